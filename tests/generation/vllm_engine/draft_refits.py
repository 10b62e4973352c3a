"""A program: vLLM's own worker, which drafts by layers for further tokens (MTP), refitted with its policy.

    python -m tests.generation.vllm_engine.draft_refits FOLDER

It prints a line of JSON: for each update of weights and transport, which parameters of the model and of these
layers then are not those that vLLM loads from the policy's folder, and what linear layers then compute.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from tests.generation.vllm_engine.loading import computed
from tests.generation.vllm_engine.models import make
from tests.generation.vllm_engine.policy import Policy, changed
from tests.generation.vllm_engine.rank_refits import BUCKET, TRANSPORTS, differing, refits
from tests.weights.ranks import Threads


def main(folder: Path) -> None:
    from nemorl.generation.vllm_engine import worker as extension

    make("mimo", folder)
    folders = folder, changed(folder, folder.with_name("changed"))
    second = copies(both(worker_of(folders[1])))
    worker = worker_of(folders[0])  # it is refitted; the module knows the layout of what was loaded last
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
    sys.stdout.write(f"REPORT {json.dumps(found)}\n")


def worker_of(folder: Path) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    config = EngineArgs(
        model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True, max_model_len=64,
        speculative_config={"method": "mtp", "num_speculative_tokens": 1},
    ).create_engine_config()  # fmt: skip
    return UniProcExecutor(config).driver_worker.worker


def both(worker: Any) -> nn.Module:
    """The model, and the layers that draft with its embedding and head."""
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
    main(Path(sys.argv[1]))
