"""The Dockerfiles of containers/ as instructions and stages, as far as the tests look at them."""

import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONTAINERS = ROOT / "containers"


@dataclass(frozen=True)
class Instruction:
    """One instruction, on one line, such as RUN and its command."""

    word: str
    rest: str

    @property
    def words(self) -> list[str]:
        """Split the JSON form, or else the shell form."""
        return json.loads(self.rest) if self.rest.startswith("[") else shlex.split(self.rest)


@dataclass
class Stage:
    """The instructions between one FROM and the next."""

    name: str
    base: str  # another stage, or an image
    instructions: list[Instruction] = field(default_factory=list)


class Dockerfile:
    """A file's stages by name, in order."""

    def __init__(self, path: Path) -> None:
        self.text = path.read_text(encoding="utf-8")
        self.arguments: dict[str, str] = {}  # those before the first FROM
        self.stages: dict[str, Stage] = {}
        self.last = ""
        for instruction in self._instructions():
            if instruction.word == "FROM":
                base, name = re.fullmatch(r"(\S+) AS (\S+)", instruction.rest).groups()  # type: ignore[union-attr]
                base = re.sub(r"\$\{(\w+)}", lambda match: self.arguments[match[1]], base)
                self.stages[name] = Stage(name, base)
                self.last = name
            elif self.stages:
                self.stages[self.last].instructions.append(instruction)
            else:
                name, _, value = instruction.rest.partition("=")
                self.arguments[name] = value

    def _instructions(self) -> list[Instruction]:
        lines = [line for line in self.text.splitlines() if not line.lstrip().startswith("#")]
        joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
        pairs = (line.partition(" ") for line in joined.splitlines() if line.strip())
        return [Instruction(word, rest.strip()) for word, _, rest in pairs]

    def chain(self, target: str) -> list[Stage]:
        """Return the stages that a target is built from, the base first."""
        stages = [self.stages[target]]
        while stages[0].base in self.stages:
            stages.insert(0, self.stages[stages[0].base])
        return stages

    def image(self, target: str) -> str:
        """Return the base image of a target."""
        return self.chain(target)[0].base

    def all_of(self, target: str, word: str) -> list[Instruction]:
        """Return a target's instructions of one kind from all its stages, in order."""
        return [one for stage in self.chain(target) for one in stage.instructions if one.word == word]


def versions(lock: str) -> dict[str, str]:
    """Return the versions by name of a file of containers/locks."""
    text = (CONTAINERS / "locks" / lock).read_text(encoding="utf-8")
    return dict(re.findall(r"^([a-z0-9-]+)==([^\s\\]+)", text, re.MULTILINE))
