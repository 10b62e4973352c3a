"""How a run follows requests to change the number of its engines; tests/session has what becomes of them."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any, cast

import pytest

from nemorl.cluster.errors import ClusterError
from nemorl.observe.files import RunFolderError
from nemorl.observe.run_folder import RunFolder, RunPaths
from nemorl.run import scaling
from nemorl.run.diagnosis import diagnose
from nemorl.run.scaling import ReplicaReport, ScaleRequest, Scaling, read
from nemorl.session.supervisor import ReplicaState


class Replicas:
    extra_nodes = frozenset[str]()

    def __init__(self) -> None:
        self.asked: list[int] = []

    async def scale(self, number: int) -> None:
        if number == 13:
            raise ClusterError("the endpoint is gone")
        self.asked.append(number)

    @property
    def states(self) -> dict[str, ReplicaState]:
        return {f"generation replica {rank}": ReplicaState("up") for rank in range(self.asked[-1])}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "POLL_SECONDS", 0.01)


def follow(folder: Path, steps: Any) -> list[int]:
    """The numbers that a run was brought to while `steps` ran."""
    replicas = Replicas()

    async def main() -> None:
        async with Scaling(folder, cast(Any, replicas), 1).running():
            await steps(RunPaths(folder))

    asyncio.run(asyncio.wait_for(main(), 60))
    return replicas.asked


async def report_on(paths: RunPaths, request: ScaleRequest) -> ReplicaReport:
    while (report := read(ReplicaReport, paths.replicas)) is None or report.request != request.id:
        await asyncio.sleep(0.01)
    return report


def test_requests_are_followed_once_and_the_newest_counts(tmp_path: Path) -> None:
    async def steps(paths: RunPaths) -> None:
        first, overwritten, newest, same = map(ScaleRequest, (3, 9, 2, 2))
        first.send(paths)
        assert (await report_on(paths, first)).complete
        overwritten.send(paths)  # by another command before the run looks
        newest.send(paths)
        assert len((await report_on(paths, newest)).replicas) == 2
        same.send(paths)
        await report_on(paths, same)
        await asyncio.sleep(0.1)

    assert follow(tmp_path, steps) == [1, 3, 2, 2]
    assert list(tmp_path.iterdir()) == []


def test_a_request_of_before_the_engines_were_up_is_followed_but_none_of_an_earlier_start(
    tmp_path: Path,
) -> None:
    request = ScaleRequest(4)

    async def steps(paths: RunPaths) -> None:
        await report_on(paths, request)

    request.send(RunPaths(tmp_path))
    assert follow(tmp_path, steps) == [1, 4]
    ScaleRequest(5).send(RunPaths(tmp_path))  # of a driver that is killed
    RunFolder.create(tmp_path, "").close()
    assert not RunPaths(tmp_path).scale_request.exists()


@pytest.mark.parametrize(
    "content", ["", '{"number": 2', '{"number": 0, "id": "a"}', '{"number": 5000, "id": "a"}', "[]"]
)
def test_a_request_that_is_malformed_is_logged_once(tmp_path: Path, content: str, caplog) -> None:
    async def steps(paths: RunPaths) -> None:
        paths.scale_request.write_text(content)
        while "is not followed" not in caplog.text:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        (request := ScaleRequest(2)).send(paths)
        await report_on(paths, request)

    assert follow(tmp_path, steps) == [1, 2]
    assert caplog.text.count("is not followed") == 1


def test_the_report_says_why_the_number_cannot_change_any_more(tmp_path: Path) -> None:
    async def steps(paths: RunPaths) -> None:
        (request := ScaleRequest(13)).send(paths)
        assert (await report_on(paths, request)).problem.endswith("any more: the endpoint is gone")

    assert follow(tmp_path, steps) == [1]


def test_doctor_shows_the_engines_that_are_to_come_and_none_that_have_left(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "")
    for rank in range(2):
        log = f"--- worker generation-{rank} process {2**22 + 1} on {os.uname().nodename} now\n"
        (folder.paths.logs / f"generation-{rank}.log").write_text(log)
    replicas = {"generation replica 0": {"state": "up"}, "generation replica 2": {"state": "waiting"}}
    folder.paths.replicas.write_text(json.dumps({"number": 2, "replicas": replicas}))
    text = "\n".join(diagnose(tmp_path).facts)
    assert "generation replica 2: waits for a place in the cluster" in text
    assert "generation-0, process" in text
    assert "generation-1, process" not in text
    folder.paths.replicas.write_text("{")
    with pytest.raises(RunFolderError, match=r"replicas\.json is no ReplicaReport"):
        diagnose(tmp_path)
    folder.close()
