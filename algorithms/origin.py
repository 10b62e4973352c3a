"""Which run and step the weights of a model folder come from: written by an export, told by an evaluation."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

ORIGIN_FILE = "nemorl.json"


@dataclass(frozen=True)
class Origin:
    """Where exported weights come from."""

    run: str  # the run folder, as it was named at the export
    step: int

    @classmethod
    def read(cls, model: Path) -> "Origin | None":
        """That of a model folder; None for one that no checkpoint was exported to."""
        try:
            content = json.loads((model / ORIGIN_FILE).read_text(encoding="utf-8"))
            return cls(str(content["run"]), int(content["step"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, model: Path) -> None:
        """Leave it in a model folder."""
        (model / ORIGIN_FILE).write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")

    def __str__(self) -> str:
        return f"step {self.step} of {self.run}"
