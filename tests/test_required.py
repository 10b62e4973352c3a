"""What is missing is a failure where it was promised, and a skip elsewhere."""

import importlib.util

import pytest

from tests.required import require_module, require_vllm


@pytest.fixture(autouse=True)
def _nothing_is_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NEMORL_REQUIRE", raising=False)


def test_elsewhere_it_is_a_skip_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(pytest.skip.Exception, match="vLLM is not installed"):
        require_vllm()
    with pytest.raises(pytest.skip.Exception, match=r"not_there.part cannot be imported \(No module named"):
        require_module("not_there.part")


def test_where_it_was_promised_it_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("NEMORL_REQUIRE", "chromium,vllm,not_there")
    with pytest.raises(pytest.fail.Exception, match="NEMORL_REQUIRE requires it"):
        require_vllm()
    with pytest.raises(pytest.fail.Exception, match=r"not_there.part .*NEMORL_REQUIRE requires it"):
        require_module("not_there.part")


def test_a_module_that_is_there_is_imported() -> None:
    assert require_module("importlib.util") is importlib.util
