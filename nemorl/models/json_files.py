"""Reading the JSON files of a model folder.

Which files of a model folder hold its tensors. Imports no torch.
"""

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


SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def indexed_files(folder: Path) -> dict[str, Path] | None:
    """The file of each tensor as the folder's index says; None where there is no index.

    Raises `BrokenModelFolder` for an index that does not say it.
    """
    index = folder / INDEX_FILE
    if not index.is_file():
        return None
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise BrokenModelFolder(f"{index} has no object weight_map, which says where each tensor is")
    return {name: folder / str(file) for name, file in weight_map.items()}
