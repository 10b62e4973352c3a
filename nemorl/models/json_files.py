"""Reading the JSON files of a model folder."""

import json
from pathlib import Path
from typing import Any

from .errors import BrokenModelFolder


def read_json_object(path: Path) -> dict[str, Any]:
    """The fields of a JSON file; `BrokenModelFolder` where it is missing or holds something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BrokenModelFolder(f"{path} is missing; it is part of every Hugging Face model folder") from None
    except OSError as error:
        raise BrokenModelFolder(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise BrokenModelFolder(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise BrokenModelFolder(f"{path} holds a {type(content).__name__}, not an object with fields")
    return content
