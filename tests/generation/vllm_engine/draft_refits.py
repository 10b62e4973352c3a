"""A program: vLLM's own worker, refitted with what it drafts by: layers for further tokens (MTP), or a head.

    python -m tests.generation.vllm_engine.draft_refits mtp|eagle3 FOLDER

It prints a line of JSON: for each update of weights and transport, which parameters of the model and of what
drafts then are not those that vLLM loads from the policy's folders, and what linear layers then compute.
"""

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from nemorl.models.eagle3 import write_head
from nemorl.models.eagle3_shape import LM_HEAD, Eagle3Shape
from nemorl.models.registry import load_shape
from tests.generation.vllm_engine.loading import computed
from tests.generation.vllm_engine.models import make
from tests.generation.vllm_engine.policy import HEAD, Policy, changed
from tests.generation.vllm_engine.rank_refits import BUCKET, TRANSPORTS, differing, refits
from tests.weights.ranks import Threads


def main(method: str, folder: Path) -> None:
    from nemorl.generation.vllm_engine import worker as extension

    make("mimo" if method == "mtp" else "qwen3", folder)
    if method == "eagle3":
        make_head(folder)
    folders = folder, changed(folder, folder.with_name("changed"))
    second = copies(both(worker_of(folders[1], method)))
    worker = worker_of(
        folders[0], method
    )  # it is refitted; the module knows the layout of what was loaded last
    weights = copies(both(worker)), second
    found: dict[str, Any] = {"changed": sorted(differing(both(worker), second))}
    for update in ("staged", "in_place"):
        extension.make_receiver(worker, update, None)
        layouts = update == "staged"
        found[update] = refits(
            folders, weights, both(worker), worker.nemorl, TRANSPORTS, other_layouts=layouts
        )
        products = computed(worker.model_runner.get_draft_model())
        found[update]["product_errors"] = {name: error for name, (_, error) in products.items()}
    extension.make_receiver(worker, "reload", None)
    found["reload"] = reloaded(folders, worker, weights)
    if method == "eagle3":
        found["shared"] = refused(folder)
    sys.stdout.write(f"REPORT {json.dumps(found)}\n")


def make_head(folder: Path, **given: Tensor) -> None:
    torch.manual_seed(3)
    shape = Eagle3Shape.of(load_shape(folder))
    weights = {name: torch.randn(extents) for name, extents in shape.tensors().items()}
    write_head(folder / HEAD, shape, weights | given, folder)


def refused(folder: Path) -> str:
    """Why a head with the output matrix of the policy takes no updates."""
    from nemorl.generation.vllm_engine import worker as extension
    from nemorl.generation.vllm_engine.weights import SharedHead

    shutil.rmtree(folder / HEAD)
    make_head(folder, **{LM_HEAD: load_file(folder / "model.safetensors")[LM_HEAD]})
    try:
        extension.make_receiver(worker_of(folder, "eagle3"), "staged", None)
    except SharedHead as error:
        return str(error)
    return ""


def worker_of(folder: Path, method: str) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    config = EngineArgs(
        model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True, max_model_len=64,
        speculative_config={
            "method": method, "num_speculative_tokens": 1,
            **({"model": str(folder / HEAD)} if method == "eagle3" else {}),
        },
    ).create_engine_config()  # fmt: skip
    return UniProcExecutor(config).driver_worker.worker


def both(worker: Any) -> nn.Module:
    """The model and what drafts, with the embedding of the model."""
    runner = worker.model_runner
    return nn.ModuleDict({"policy": runner.get_model(), "drafts": runner.get_draft_model()})


def copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def reloaded(
    folders: tuple[Path, Path], worker: Any, weights: tuple[dict[str, Tensor], dict[str, Tensor]]
) -> list[str]:
    """What is wrong after updates through vLLM's loaders, to the second folder and back."""
    from nemorl.weights.exchange import TransportOptions, WeightExchange

    policy, wrong = Policy(folders[0]), set()
    receivers = Threads([SimpleNamespace(exchange=worker.nemorl)])
    exchange = WeightExchange(policy, receivers, BUCKET, 60.0, TransportOptions("shared_memory", ""))
    for version, which in enumerate((1, 0), start=1):
        policy.load(folders[which])
        asyncio.run(exchange.refit(version))
        wrong |= differing(both(worker), weights[which])
    return sorted(wrong)


if __name__ == "__main__":
    os.environ |= {
        "NEMORL_VLLM_LEARNED_LAYOUT": "1",
        "NEMORL_VLLM_TRAINED_DRAFTS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    main(sys.argv[1], Path(sys.argv[2]))
