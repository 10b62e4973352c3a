"""Which files of a model folder hold its tensors. Imports no torch."""

from pathlib import Path

from .errors import BrokenModelFolder
from .json_files import read_json_object

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
