"""Tiny models of every family, written once."""

import pytest

from tests.models.tiny_models import CONFIGS, TinyModel, write_tiny


@pytest.fixture(scope="session", params=list(CONFIGS))
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return write_tiny(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="session", params=[name for name in CONFIGS if not name.startswith("deepseek")])
def tiny_grouped(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Of the families with grouped queries, whose projections Megatron fuses."""
    return write_tiny(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="session", params=[name for name in CONFIGS if name not in ("mixtral", "gpt-oss")])
def tiny_with_mlp(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Of the families whose first layer has no experts."""
    return write_tiny(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return write_tiny("llama", tmp_path_factory.mktemp("llama"))
