"""The child process for the user's code: what hangs, exits or allocates ends the child alone."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemorl.errors import NemorlError
from nemorl.ui import compose
from nemorl.ui.children import Child, ChildError
from tests.ui.user_rewards import LINES, REWARDS, TEXT


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my_rewards.py").write_text(REWARDS, encoding="utf-8")
    return tmp_path


@pytest.fixture
def child(folder: Path) -> Iterator[Child]:
    child = Child(folder, seconds=20, memory_bytes=2**31)
    yield child
    child.close()


def score(child: Child, reward: str) -> compose.Json:
    answer = child.call(compose.score, TEXT.replace("REWARD", reward), "x.yaml", "lines", LINES, 100)
    assert answer is not None
    return answer


@pytest.mark.ci
def test_what_the_users_code_does_ends_the_child_only(child: Child) -> None:
    found = score(child, "right")
    exact, mine = found["parts"]
    assert exact["values"] == mine["values"] == [1.0, 0.0, 1.0, 1.0]
    assert found["totals"] == [3.0, 0.0, 3.0, 3.0]
    assert (found["equal_groups"], found["groups"]) == (1, 2)
    assert len(found["problems"]) == 1
    assert found["problems"][0].startswith("line 3: `no JSON` is not JSON (at column 1); write {")

    raises = score(child, "raises")["parts"][1]
    assert raises["errors"] == ["reward `raises`: ZeroDivisionError: division by zero"] * 4
    assert "my_rewards.py" in raises["traceback"]

    with pytest.raises(ChildError, match=r"ended \(exit code 7\); it calls exit, crashed"):
        score(child, "leaves")
    allocates = score(child, "allocates")["parts"][1]
    assert "MemoryError" in allocates["errors"][0]
    assert score(child, "right")["totals"] == [3.0, 0.0, 3.0, 3.0]


@pytest.mark.ci
def test_a_hanging_child_is_ended_at_its_deadline(folder: Path) -> None:
    child = Child(folder, seconds=4)
    began = time.monotonic()
    with pytest.raises(ChildError, match="no answer within 4 s, and the process that ran the code was ended"):
        child.call(time.sleep, 100)
    assert time.monotonic() - began < 15
    child.close()


@pytest.mark.ci
def test_a_changed_file_is_imported_again(child: Child, folder: Path) -> None:
    """Also within a second and with the same size, by which Python takes what it has compiled for current."""
    file = folder / "my_rewards.py"
    os.utime(file, ns=(10**18, 10**18))
    assert score(child, "right")["totals"][0] == 3.0
    first = child.call(os.getpid)
    file.write_text(REWARDS.replace("[float(c == a) for", "[5.0           for"), encoding="utf-8")
    assert file.stat().st_size == len(REWARDS)
    os.utime(file, ns=(10**18 + 1, 10**18 + 1))
    assert score(child, "right")["parts"][1]["values"] == [5.0] * 4
    assert child.call(os.getpid) != first


@pytest.mark.ci
def test_a_file_that_changes_while_it_is_used_is_imported_again(child: Child, folder: Path) -> None:
    """Here in the moment in which it is imported."""
    file = folder / "my_rewards.py"
    file.write_text(f"{REWARDS}\nopen(__file__, 'a').write('#')\n", encoding="utf-8")
    score(child, "right")
    first = child.call(os.getpid)
    assert file.read_text(encoding="utf-8").endswith("#")
    score(child, "right")
    assert child.call(os.getpid) != first


def test_errors_of_the_function_itself_are_raised(child: Child) -> None:
    with pytest.raises(NemorlError, match="no answers to score: the text is empty"):
        child.call(
            compose.score, TEXT.replace("my_rewards:REWARD", "format_tags"), "x.yaml", "lines", "", 100
        )
