"""`nemorl doctor` as a health check of a container."""

from dataclasses import replace
from importlib import import_module
from types import ModuleType

import pytest
import torch

from nemorl.commands import doctor
from nemorl.plan.machine import Gpu, read_machine
from tests.cli.conftest import Nemorl

GPU = Gpu("a GPU", 80 * 10**9)


def set_gpus(
    monkeypatch: pytest.MonkeyPatch, listed: int, usable: int, cuda: str | None, *, available: bool = True
) -> None:
    """What the driver lists, and what torch can use of it."""
    monkeypatch.setattr(doctor, "read_machine", lambda: replace(read_machine(), gpus=(GPU,) * listed))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: usable)
    monkeypatch.setattr(torch.version, "cuda", cuda)


def test_a_brief_check_says_one_line(nemorl: Nemorl) -> None:
    outcome = nemorl("doctor", "--brief")
    assert (outcome.status, outcome.out) == (0, "ready to train on this machine\n")


def test_a_brief_check_says_what_was_found_instead(nemorl: Nemorl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "REQUIRED", {"megatron-kore": "workers"})
    outcome = nemorl("doctor", "--brief")
    assert (outcome.status, outcome.out) == (1, "not ready: megatron-kore (not installed)\n")


def test_a_package_that_breaks_the_policy_worker_is_found(
    nemorl: Nemorl, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(name: str) -> ModuleType:
        if name == "nemorl.megatron.worker":
            raise AttributeError("module 'cuda.bindings.runtime' has no attribute 'cudaLibrary_t'")
        return import_module(name)

    monkeypatch.setattr(doctor, "import_module", broken)
    outcome = nemorl("doctor", "--brief")
    assert outcome.status == 1
    found = "policy worker (cannot be imported: AttributeError: module 'cuda.bindings.runtime' has no"
    assert found in " ".join(outcome.out.split())


def test_gpus_that_a_job_asks_for_and_are_not_handed_in(nemorl: Nemorl) -> None:
    outcome = nemorl("doctor", "--brief", "--gpus", "8")
    assert outcome.status == 1
    assert "CUDA (this torch build has no CUDA; 8 GPUs were requested)" in " ".join(outcome.out.split())


def test_a_driver_too_old_for_the_cuda_of_the_image(nemorl: Nemorl, monkeypatch: pytest.MonkeyPatch) -> None:
    set_gpus(monkeypatch, listed=2, usable=2, cuda="13.0", available=False)
    outcome = nemorl("doctor", "--brief")
    assert outcome.status == 1
    assert "CUDA (torch for CUDA 13.0 can use 0 of 2 GPUs)" in " ".join(outcome.out.split())


def test_fewer_gpus_than_asked_for(nemorl: Nemorl, monkeypatch: pytest.MonkeyPatch) -> None:
    set_gpus(monkeypatch, listed=2, usable=2, cuda="13.0")
    assert nemorl("doctor", "--brief", "--gpus", "2").status == 0
    assert nemorl("doctor", "--brief", "--gpus", "3").status == 1


def test_a_torch_without_cuda_is_a_choice(nemorl: Nemorl, monkeypatch: pytest.MonkeyPatch) -> None:
    set_gpus(monkeypatch, listed=1, usable=0, cuda=None, available=False)
    assert nemorl("doctor", "--brief").status == 0
