"""How the tests are shared out among processes: `make test` runs two of them at the same time.

Most tests wait for processes to start more than they compute, so two halves take little more than one.
"""

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

# Folders whose files share what is dear to start: a pool of Megatron's processes, engines, a Slurm.
SHARING = ("tests/megatron/", "tests/generation/", "tests/serve/", "tests/slurm/")


class ByWhatIsShared(LoadScopeScheduling):
    """The tests of a file stay together, and so do those of a folder in `SHARING`."""

    def _split_scope(self, nodeid: str) -> str:
        return next((folder for folder in SHARING if nodeid.startswith(folder)), nodeid.partition("::")[0])


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByWhatIsShared:
    """Take ours, whatever `--dist` says."""
    return ByWhatIsShared(config, log)
