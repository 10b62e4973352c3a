"""Task folders in the formats of Harbor and terminal-bench: what a sandbox needs to run one.

    Harbor            terminal-bench
    instruction.md    task.yaml          what the policy is asked (docs/data.md reads it)
    task.toml         task.yaml          settings
    environment/      .                  Dockerfile and the files that it copies
    tests/test.sh     run-tests.sh       writes a reward, or exits with 0 if all tests pass
    tests/            tests/             shown at /tests only after the policy has ended

Formats: https://www.harborframework.com/docs/tasks, https://www.tbench.ai/docs
"""

import json
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml

from nemorl.config.terminal_environment import TerminalEnvConfig, TerminalSandboxConfig
from nemorl.trajectories import Task

TESTS = "/tests"  # in the sandbox
_WORKDIR = "/app"  # where a Dockerfile names none
# Programs that a sandbox without a network cannot use: tests or images that install packages.
_INSTALLS = re.compile(
    r"\b(?:(?:apt|apt-get|apk|dnf|yum|pip|pip3|uv|npm|yarn|conda|cargo|gem|go)\s+(?:-\S+\s+)*"
    r"(?:install|update|add|get|sync|tool)\b|uvx\b|(?:curl|wget)\s[^|;&]*https?://|git\s+clone\s+\S*://)"
)
_IGNORED = ("ARG", "CMD", "EXPOSE", "LABEL", "MAINTAINER", "STOPSIGNAL", "USER")  # of a Dockerfile


@dataclass(frozen=True)
class Copy:
    """Files of the folder that belong into the sandbox: COPY of a Dockerfile."""

    sources: tuple[Path, ...]
    target: str  # absolute
    is_folder: bool  # the target, where a single file is copied


@dataclass(frozen=True)
class Run:
    """A command that prepares the sandbox: RUN of a Dockerfile."""

    command: str
    folder: str
    variables: Mapping[str, str]


@dataclass(frozen=True)
class TaskFolder:
    path: Path
    workdir: str  # where commands start
    variables: Mapping[str, str]  # of the policy's commands
    test_variables: Mapping[str, str]
    build: tuple[Copy | Run, ...]  # in this order
    test_files: Copy
    test_script: str  # in the sandbox
    exit_is_reward: bool  # without a reward file, the exit status of the tests is the reward
    lacks: tuple[str, ...]  # what the task requires and a sandbox of ours does not have


def folder_of(task: Task, config: TerminalEnvConfig) -> TaskFolder:
    """The folder that a task names. Raises ValueError for one that cannot be read, or run in the sandbox."""
    value = task.columns.get(config.folder_key)
    if not isinstance(value, str):
        fix = "name a folder of task folders in `data`, or set folder_key"
        raise ValueError(f"task {task.index} has no folder in its column `{config.folder_key}`; {fix}")
    folder = read_task_folder(Path(value), config)
    if folder.lacks and isinstance(config.sandbox, TerminalSandboxConfig):
        raise ValueError(f"{folder.path} requires {'; '.join(folder.lacks)}")
    return folder


def read_task_folder(path: Path, config: TerminalEnvConfig) -> TaskFolder:
    """Raises ValueError for a folder that is in neither format."""
    try:
        if (path / "instruction.md").is_file():
            return _read_harbor(path, config)
        if (path / "task.yaml").is_file():
            return _read_terminal_bench(path, config)
    except (OSError, tomllib.TOMLDecodeError, yaml.YAMLError, AttributeError, TypeError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    raise ValueError(f"{path} has neither an instruction.md nor a task.yaml")


def _read_harbor(path: Path, config: TerminalEnvConfig) -> TaskFolder:
    settings_path = path / "task.toml"
    settings = tomllib.loads(settings_path.read_text(encoding="utf-8")) if settings_path.is_file() else {}
    environment, verifier = settings.get("environment", {}), settings.get("verifier", {})
    if not (path / "tests" / "test.sh").is_file() and not settings.get("steps"):
        raise ValueError(f"{path} has no tests/test.sh")
    lacks: list[str] = []
    if settings.get("steps"):
        lacks.append("several steps (steps in task.toml)")
    if str(environment.get("os", "linux")).lower() != "linux":
        lacks.append(f"the operating system {environment['os']}")
    unsupported = ("gpus", "tpu", "mcp_servers", "healthcheck", "skills_dir")
    lacks += [f"environment.{key} of task.toml" for key in unsupported if environment.get(key)]
    if verifier.get("environment_mode") == "separate" or verifier.get("environment"):
        lacks.append("tests in a container of their own (verifier in task.toml)")
    if verifier.get("collect"):
        lacks.append("verifier.collect of task.toml")
    if (path / "environment" / "docker-compose.yaml").is_file():
        lacks.append("several containers (environment/docker-compose.yaml)")
    variables, test_variables = environment.get("env", {}), verifier.get("env", {})
    for name, value in {**variables, **test_variables}.items():
        if "${" in str(value):
            lacks.append(f"the variable {name} of the machine")
    image = _Image(path / "environment", config)
    if (name := environment.get("docker_image")) is not None:
        image.base(name)
    else:
        image.read()
    tests = path / "tests"
    return TaskFolder(
        path,
        environment.get("workdir") or image.workdir,
        image.variables | variables,
        image.variables | variables | test_variables,
        tuple(image.build),
        Copy((tests,), TESTS, is_folder=True),
        f"{TESTS}/test.sh",
        exit_is_reward=False,
        lacks=(*lacks, *image.lacks, *_installs_in(tests.glob("*.sh"))),
    )


def _read_terminal_bench(path: Path, config: TerminalEnvConfig) -> TaskFolder:
    script = path / "run-tests.sh"
    if not script.is_file():
        raise ValueError(f"{path} has no run-tests.sh")
    lacks = []
    compose = path / "docker-compose.yaml"
    services = (yaml.safe_load(compose.read_text(encoding="utf-8")) or {}) if compose.is_file() else {}
    if len(services.get("services", ())) > 1:
        lacks.append("several containers (docker-compose.yaml)")
    image = _Image(path, config)
    image.read()
    tests = tuple(one for one in (path / "tests", script) if one.exists())
    return TaskFolder(
        path,
        image.workdir,
        image.variables,
        image.variables | {"TEST_DIR": TESTS},
        tuple(image.build),
        Copy(tests, TESTS, is_folder=True),
        f"{TESTS}/{script.name}",
        exit_is_reward=True,
        lacks=(*lacks, *image.lacks, *_installs_in([script, *(path / "tests").glob("*.sh")])),
    )


def _installs_in(scripts: Any) -> Iterator[str]:
    for script in sorted(scripts):
        if found := _INSTALLS.search(script.read_text(encoding="utf-8", errors="replace")):
            yield f"a network for `{found.group()}` in {script.name}"


class _Image:
    """A Dockerfile, as far as a sandbox can do what it says."""

    def __init__(self, context: Path, config: TerminalEnvConfig) -> None:
        self._context, self._config = context, config
        self.workdir, self.variables = _WORKDIR, dict[str, str]()
        self.build: list[Copy | Run] = []
        self.lacks: list[str] = []

    def base(self, name: str) -> None:
        tagged = name if ":" in name.rpartition("/")[2] else f"{name}:latest"
        if not any(fnmatch(tagged, pattern) for pattern in self._config.images):
            self.lacks.append(f"the image {name}")

    def read(self) -> None:
        """Raises OSError if there is no Dockerfile."""
        text = (self._context / "Dockerfile").read_text(encoding="utf-8")
        lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
        num_bases = 0
        for line in re.sub(r"\\\s*\n", " ", lines).splitlines():
            keyword, _, rest = line.strip().partition(" ")
            keyword, rest = keyword.upper(), rest.strip()
            match keyword:
                case "FROM":
                    num_bases += 1
                    words = [word for word in rest.split() if not word.startswith("--")]
                    self.base(words[0] if words else "")
                case "WORKDIR" if "$" not in rest:
                    self.workdir = self._absolute(rest)
                case "ENV" if "$" not in rest:
                    is_pairs = "=" in rest.partition(" ")[0]  # NAME=value …, else NAME value
                    pairs = shlex.split(rest) if is_pairs else [rest.replace(" ", "=", 1)]
                    self.variables |= dict(pair.split("=", 1) for pair in pairs)
                case "COPY" | "ADD" if not re.search(r"\$|--from|<<|://|\.tar|\.tgz", rest):
                    self._copy(rest)
                case "RUN" if not rest.startswith(("[", "<<", "--")):
                    self._run(rest)
                case _ if keyword and keyword not in _IGNORED:
                    self.lacks.append(f"`{line.strip()}` of the Dockerfile")
        if num_bases > 1:
            self.lacks.append("an image built in stages")

    def _copy(self, rest: str) -> None:
        words = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
        *names, target = [word for word in words if not word.startswith("--")]
        sources = [path for name in names for path in sorted(self._context.glob(name.strip("/") or "."))]
        if name := next((name for name in names if ".." in Path(name).parts), None):
            self.lacks.append(f"the file {name} outside of the folder")
        elif not sources:
            self.lacks.append(f"the files {' '.join(names)}, which the folder lacks")
        place = self._absolute(target)
        is_folder = target.endswith(("/", ".")) or len(sources) > 1 or place == self.workdir
        self.build.append(Copy(tuple(sources), place, is_folder))

    def _run(self, command: str) -> None:
        if found := _INSTALLS.search(command):
            self.lacks.append(f"a network for `{found.group()}` in the Dockerfile")
        self.build.append(Run(command, self.workdir, dict(self.variables)))

    def _absolute(self, folder: str) -> str:
        absolute = str(Path(self.workdir, folder.strip("\"'")))
        top = "/" + absolute.split("/")[1]
        sandbox = self._config.sandbox
        if isinstance(sandbox, TerminalSandboxConfig) and top not in (*sandbox.folders, "/tmp"):
            self.lacks.append(f"the folder {absolute}, which is not below one of env.sandbox.folders")
        return absolute
