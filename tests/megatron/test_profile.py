"""Traces of a rank without a run: what a failed step and a full disk leave."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from nemorl.config.policy import ProfileConfig
from nemorl.megatron.profile import StepProfile
from nemorl.megatron.schedule import stage_range

CPU = torch.device("cpu")


def test_a_step_that_failed_leaves_no_trace(tmp_path: Path) -> None:
    profile = StepProfile(ProfileConfig(step_numbers=(1, 2)), CPU)
    profile.start()
    profile.start()  # of the next step
    torch.ones(4, 4) @ torch.ones(4, 4)
    profile.end(tmp_path / "profiles" / "second")
    profile.end(tmp_path / "profiles" / "third")  # which was not begun

    assert [file.name for file in (tmp_path / "profiles").iterdir()] == ["second.json.gz"]


class Nvtx:
    """A stand-in for `torch.cuda.nvtx`."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        self.calls.append(f"push {name}")
        try:
            yield
        finally:
            self.calls.append("pop")


@pytest.mark.parametrize(
    ("build", "has_gpu", "calls"),
    [("12.8", True, ["push outer", "push inner", "pop", "pop"]), ("12.8", False, []), (None, True, [])],
)
def test_ranges_nest_and_need_cuda(
    monkeypatch: pytest.MonkeyPatch, build: str | None, has_gpu: bool, calls: list[str]
) -> None:
    nvtx = Nvtx()
    monkeypatch.setattr(torch.cuda, "nvtx", nvtx)
    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)

    with pytest.raises(ValueError, match="failed"), stage_range("outer"), stage_range("inner"):
        raise ValueError("failed")

    assert nvtx.calls == calls


def test_a_folder_that_takes_no_file_costs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "profiles").write_text("a file")
    profile = StepProfile(ProfileConfig(step_numbers=(1,)), CPU)
    profile.start()
    with caplog.at_level(logging.WARNING):
        profile.end(tmp_path / "profiles" / "first")
    assert "first.json.gz was not written" in caplog.text
