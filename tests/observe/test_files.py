"""Lines are in a file whole or not at all, whatever happens to the process or the disk."""

import json
from pathlib import Path

import pytest

from nemorl.observe.files import (
    JsonLinesWriter,
    RunFolderError,
    WriteError,
    keep_json_lines,
    read_json_lines,
    write_atomically,
)
from tests.full_disk import files_end_at


def lines_of(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_a_partial_last_line_is_left_out_and_cut_off_before_the_next(tmp_path):
    path = lines_of(tmp_path / "m.jsonl", {"step": 1}, {"step": 2})
    path.write_bytes(path.read_bytes() + b'{"step": 3, "rew')
    assert read_json_lines(path) == [{"step": 1}, {"step": 2}]

    writer = JsonLinesWriter(path)
    writer.append({"step": 3})
    writer.close()
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'


@pytest.mark.parametrize("damage", ["{oops", "[1, 2]", "\x00\x00"])
def test_damage_in_the_middle_is_an_error_that_names_the_line(tmp_path, damage):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n' + damage + '\n{"step": 3}\n')
    with pytest.raises(RunFolderError, match=r"m\.jsonl, line 2 is "):
        read_json_lines(path)


def test_a_full_disk_leaves_whole_lines_and_a_sentence(tmp_path):
    path = tmp_path / "m.jsonl"
    writer = JsonLinesWriter(path)
    writer.append({"text": "a" * 50})
    whole = path.read_text()
    with files_end_at(100), pytest.raises(WriteError, match=r"m\.jsonl could not be written: .* MB are free"):
        writer.append({"text": "b" * 200})
    assert path.read_text() == whole

    writer.append({"text": "c"})  # there is room again
    writer.close()
    assert read_json_lines(path) == [{"text": "a" * 50}, {"text": "c"}]


def test_a_full_disk_keeps_the_file_that_was_to_be_replaced(tmp_path):
    path = tmp_path / "config.yaml"
    write_atomically(path, "seed: 1\n")
    with files_end_at(100), pytest.raises(WriteError, match=r"config\.yaml could not be written"):
        write_atomically(path, "x" * 200)
    assert path.read_text() == "seed: 1\n"
    assert [p.name for p in tmp_path.iterdir()] == ["config.yaml"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(WriteError, match=r"missing/m\.jsonl could not be written: No such file"):
        JsonLinesWriter(tmp_path / "missing" / "m.jsonl")


def test_lines_are_kept_by_what_they_say(tmp_path):
    path = lines_of(tmp_path / "m.jsonl", *({"step": step} for step in range(5)))
    keep_json_lines(path, lambda line: line["step"] <= 2)
    assert [line["step"] for line in read_json_lines(path)] == [0, 1, 2]
    keep_json_lines(tmp_path / "absent.jsonl", lambda line: True)
    assert not (tmp_path / "absent.jsonl").exists()
