"""Rows of datasets, as dicts: from JSON lines, Parquet, Arrow, lines of text, Hugging Face datasets, task
folders and the user's generators."""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain, islice
from pathlib import Path
from typing import Any

import yaml

from nemorl.config.base import NotImported, function_at
from nemorl.config.data import FileDataset, GeneratorDataset
from nemorl.errors import NemorlError

Row = dict[str, Any]
RowsDataset = FileDataset | GeneratorDataset
_HUB_SECONDS = 10.0  # for an answer
_MAX_ROWS = 10_000_000  # of a generator whose end is awaited
_PACKAGES = "install it with `pip install 'nemorl[data]'`"


class DatasetError(NemorlError, ValueError):
    """A dataset that cannot be read or made; the message names the file, line and key or the option."""


def read_rows(dataset: RowsDataset, skip: int = 0) -> Iterator[tuple[str, Row | DatasetError]]:
    """The rows after the first `skip`, or what is wrong with one, each with its place, as `f.jsonl, line 3`.

    Raises DatasetError for a source that cannot be read.
    """
    for place, row in _raw(dataset, skip):
        if not isinstance(row, DatasetError) and dataset.columns:
            yield place, _with_columns(row, dataset.columns)
        else:
            yield place, row


def first_row(dataset: RowsDataset) -> Row:
    """Raises DatasetError, also if it is no row or if there is none."""
    for place, row in read_rows(dataset):
        if isinstance(row, DatasetError):
            raise DatasetError(f"{place}: {row}") from row
        return row
    raise DatasetError(no_rows(dataset))


def count_rows(dataset: RowsDataset, limit: int, seconds: float) -> int | None:
    """The number of rows, at most `limit`; None if it takes longer to count them, or a download.

    Raises DatasetError.
    """
    end = time.monotonic() + seconds
    counts: Iterable[int] = (1 for _ in _raw(dataset, 0))
    if isinstance(dataset, FileDataset):
        if not dataset.path.exists():
            return None
        if dataset.split is None and not _task_folders(dataset):
            counts = chain.from_iterable(map(_counts, _files(dataset)))
    total = 0
    for count in counts:
        total += count
        if total >= limit:
            return limit
        if time.monotonic() > end:
            return None
    return total


def no_rows(dataset: RowsDataset) -> str:
    if isinstance(dataset, GeneratorDataset):
        return f"{dataset.source} yields no rows"
    if dataset.split is None and dataset.path.is_file() and dataset.path.suffix not in _READERS:
        return f"{dataset.path} holds no tasks: the file is empty; write one JSON object per line"
    return f"{dataset.path} holds no tasks"


def _with_columns(row: Row, columns: dict[str, str]) -> Row | DatasetError:
    missing = next((old for old in columns.values() if old not in row), None)
    if missing is not None:
        return DatasetError(
            f"column `{missing}` is missing; there are {sorted(row)} (option `data.*.columns`)"
        )
    return row | {new: row[old] for new, old in columns.items()}


def _raw(dataset: RowsDataset, skip: int) -> Iterator[tuple[str, Row | DatasetError]]:
    if isinstance(dataset, GeneratorDataset):
        yield from _generated(dataset, skip)
    elif dataset.split is not None:
        yield from _hugging_face(dataset, dataset.split, skip)
    elif folders := _task_folders(dataset):
        yield from _instructions(folders[skip:])
    else:
        for file in _files(dataset):
            yield from _READERS.get(file.suffix, _json_lines)(file, skip)
            skip = max(0, skip - _count(file)) if skip else 0


def _files(dataset: FileDataset) -> list[Path]:
    path, pattern = dataset.path, dataset.files
    if pattern is not None:
        if path.is_file():
            problem = f"`{pattern}` is of a folder, and {path} is a file: name its folder, or remove files"
            raise DatasetError(f"{problem} (option `data.*.files`)")
        try:
            files = sorted(file for file in path.glob(pattern) if file.is_file())
        except (NotImplementedError, ValueError) as error:  # of an absolute pattern
            raise DatasetError(f"`{pattern}` is no pattern: {error} (option `data.*.files`)") from error
        if not files:
            problem = f"no file in the folder {path} matches `{pattern}`"
            raise DatasetError(f"{problem}: correct the pattern (option `data.*.files`)")
        return files
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.iterdir() if file.suffix in (".jsonl", ".parquet", ".arrow"))
    if not files:
        fix = "name a file, or set `split` to read it as a Hugging Face dataset"
        raise DatasetError(f"the folder {path} holds no .jsonl, .parquet and .arrow files: {fix}")
    return files


_INSTRUCTIONS = ("instruction.md", "task.yaml")  # of a task folder of Harbor and of terminal-bench


def _task_folders(dataset: FileDataset) -> list[Path]:
    """The folders in a folder that each are a task, for the environment `terminal`."""
    path = dataset.path
    if dataset.files is not None or not path.is_dir():
        return []
    inner = sorted(folder for folder in path.iterdir() if folder.is_dir())
    return [folder for folder in inner if any((folder / name).is_file() for name in _INSTRUCTIONS)]


def _instructions(folders: list[Path]) -> Iterator[tuple[str, Row | DatasetError]]:
    for folder in folders:
        file = next(folder / name for name in _INSTRUCTIONS if (folder / name).is_file())
        try:
            text = file.read_text(encoding="utf-8")
            prompt = yaml.safe_load(text)["instruction"] if file.suffix == ".yaml" else text
        except (OSError, ValueError, LookupError, TypeError, yaml.YAMLError) as error:
            yield str(file), DatasetError(f"it has no instruction that can be read: {error}")
        else:
            yield str(file), {"prompt": prompt, "task": folder.name, "folder": str(folder.absolute())}


def _count(file: Path) -> int:
    return sum(_counts(file))


def _counts(file: Path) -> Iterator[int]:
    """Numbers of rows that add up to those of the file, read as far as they are taken."""
    if file.suffix == ".parquet":
        yield int(_parquet_file(file).metadata.num_rows)
    elif file.suffix == ".arrow":
        yield from (batch.num_rows for batch in _arrow_batches(file))
    else:
        with file.open("rb") as lines:
            yield from (1 for line in lines if line.strip())


def _json_lines(file: Path, skip: int) -> Iterator[tuple[str, Row | DatasetError]]:
    try:
        # Not str.splitlines, which also splits at characters that JSON strings may hold, such as U+2028.
        with file.open(encoding="utf-8") as lines:
            numbered = ((number, line) for number, line in enumerate(lines, start=1) if line.strip())
            for number, line in islice(numbered, skip, None):
                yield f"{file}, line {number}", _parsed(line)
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"cannot read the dataset {file}: {error}") from error


def _text_lines(file: Path, skip: int) -> Iterator[tuple[str, Row | DatasetError]]:
    """Lines that are not blank, each a row with the key `text`."""
    try:
        with file.open(encoding="utf-8") as lines:
            numbered = ((number, line) for number, line in enumerate(lines, start=1) if line.strip())
            for number, line in islice(numbered, skip, None):
                yield f"{file}, line {number}", {"text": line.rstrip("\n")}
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"cannot read the dataset {file}: {error}") from error


def _parsed(line: str) -> Row | DatasetError:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        return DatasetError(f"not JSON: {error}")
    return row if isinstance(row, dict) else DatasetError(f"expected a JSON object, not {type(row).__name__}")


@contextmanager
def _pyarrow_reads(file: Path) -> Iterator[None]:
    """Raises DatasetError where the package is missing, and for what it cannot read."""
    try:
        import pyarrow
    except ImportError as error:
        raise DatasetError(f"{file} requires the package pyarrow; {_PACKAGES}") from error
    try:
        yield
    except (OSError, pyarrow.ArrowException) as error:
        raise DatasetError(f"cannot read the dataset {file}: {error}") from error


def _parquet_file(file: Path) -> Any:
    with _pyarrow_reads(file):
        import pyarrow.parquet

        return pyarrow.parquet.ParquetFile(file)


def _arrow_batches(file: Path) -> Iterator[Any]:
    """Batches of rows, in either of the formats: the stream that the package datasets writes, or the file."""
    with _pyarrow_reads(file):
        import pyarrow

        with pyarrow.memory_map(str(file)) as source:
            if source.read(6) == b"ARROW1":
                opened = pyarrow.ipc.open_file(source)
                yield from (opened.get_batch(number) for number in range(opened.num_record_batches))
            else:
                source.seek(0)
                yield from pyarrow.ipc.open_stream(source)


def _arrow(file: Path, skip: int) -> Iterator[tuple[str, Row | DatasetError]]:
    return _batched(file, ((batch.num_rows, [batch]) for batch in _arrow_batches(file)), skip)


def _parquet(file: Path, skip: int) -> Iterator[tuple[str, Row | DatasetError]]:
    opened = _parquet_file(file)
    groups = range(opened.num_row_groups)
    sizes = (opened.metadata.row_group(group).num_rows for group in groups)
    batches = (opened.iter_batches(row_groups=[group]) for group in groups)  # a group is read when they are
    return _batched(file, zip(sizes, batches, strict=True), skip)


def _batched(
    file: Path, parts: Iterable[tuple[int, Iterable[Any]]], skip: int
) -> Iterator[tuple[str, Row | DatasetError]]:
    """Rows of the parts of a file, each a number of rows and batches of them; skipped parts are not read."""
    number = 0
    for size, batches in parts:
        if number + size <= skip:
            number += size
            continue
        for batch in batches:
            for row in batch.to_pylist():
                if number >= skip:
                    yield f"{file}, row {number + 1}", row
                number += 1


_READERS = {".parquet": _parquet, ".arrow": _arrow, ".txt": _text_lines}


def _hugging_face(dataset: FileDataset, split: str, skip: int) -> Iterator[tuple[str, Row | DatasetError]]:
    name = str(dataset.path)
    try:
        import datasets
    except ImportError as error:
        raise DatasetError(f"the dataset {name} requires the package datasets; {_PACKAGES}") from error
    streaming = getattr(dataset, "stream", None) is not None
    unreachable = None if dataset.path.exists() else _unreachable_hub(name, dataset.revision)
    try:
        if (dataset.path / "dataset_dict.json").is_file():  # written by its save_to_disk
            rows = datasets.load_from_disk(name)[split]
        elif (dataset.path / "state.json").is_file():
            rows = datasets.load_from_disk(name)
        else:
            options = {"split": split, "streaming": streaming, "revision": dataset.revision}
            options |= {} if dataset.files is None else {"data_files": dataset.files}
            # Without an answer of the hub, what is in the cache.
            with _offline(datasets.config) if unreachable else nullcontext():
                rows = datasets.load_dataset(name, dataset.subset, **options)
        for number, row in enumerate(rows.skip(skip) if skip else rows, start=skip + 1):
            yield f"{name} ({split}), row {number}", row
    except Exception as error:  # a library with errors of its own, and of file formats and HTTP
        if isinstance(error, NemorlError):
            raise
        reason = unreachable or f"{type(error).__name__}: {error}"
        problem = f"cannot read the dataset {name} ({split}): {reason}"
        raise DatasetError(f"{problem}{_hub_fix(dataset.path)}") from error


@contextmanager
def _offline(config: Any) -> Iterator[None]:
    """Inside, the package datasets does not ask the hub."""
    before, config.HF_HUB_OFFLINE = config.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE = before


def _unreachable_hub(name: str, revision: str | None) -> str | None:
    """Why the hub cannot be asked for a dataset; None if it answers, or is not to be asked.

    `datasets` itself would ask for a minute, and print a warning each time.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        HfApi().dataset_info(name, revision=revision, timeout=_HUB_SECONDS)
    except (HfHubHTTPError, OfflineModeIsEnabled, ValueError):  # which `datasets` reports
        return None
    except Exception as error:  # noqa: BLE001  of its HTTP client, which differs between versions
        return f"{type(error).__name__}: {error}"
    return None


def _hub_fix(path: Path) -> str:
    if path.exists():
        return ""
    hub = os.environ.get("HF_ENDPOINT", "the hub")
    fix = f"download it where {hub} can be reached, with `hf download --repo-type dataset {path}`"
    return f". There is no folder {path}, so it was looked up on {hub}; {fix}, and name the folder"


def _generated(dataset: GeneratorDataset, skip: int) -> Iterator[tuple[str, Row | DatasetError]]:
    name = dataset.function
    try:
        function: Callable[..., Any] = function_at(name)
    except NotImported as error:
        raise DatasetError(str(error)) from error
    try:
        for number, row in enumerate(islice(function(**dataset.arguments), skip, None), start=skip + 1):
            if dataset.size is None and number > _MAX_ROWS:
                raise DatasetError(
                    f"{name} yields more than {_MAX_ROWS:,} rows; set size (option `data.*.size`)"
                )
            if isinstance(row, dict):
                yield f"{name}, row {number}", row
            else:
                problem = f"expected a dict with the columns of a task, not {type(row).__name__}"
                yield f"{name}, row {number}", DatasetError(problem)
    except Exception as error:  # the user's code
        if isinstance(error, NemorlError):
            raise
        raise DatasetError(f"{name} raised {type(error).__name__}: {error}") from error
