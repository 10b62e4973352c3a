"""A missing vLLM is a failure where it was promised, and a skip elsewhere."""

import importlib.util

import pytest

from tests.required import require_vllm


@pytest.fixture(autouse=True)
def _missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("NEMORL_REQUIRE", raising=False)


def test_elsewhere_it_is_a_skip_with_its_reason() -> None:
    with pytest.raises(pytest.skip.Exception, match="vLLM is not installed"):
        require_vllm()


def test_where_it_was_promised_it_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEMORL_REQUIRE", "chromium,vllm")
    with pytest.raises(pytest.fail.Exception, match="NEMORL_REQUIRE requires it"):
        require_vllm()
