"""A program: vLLM's own model classes in the ranks of an engine, without the engine.

    python -m tests.generation.vllm_engine.loading RANK RANKS PORT staged|reload FOLDER...

For every model folder it learns the layout while vLLM loads the model, writes zeros over everything, brings
the weights back by the layout, and says in a line of JSON what came of it. Ranks of one call run beside
each other, in bfloat16 where there are several; these are then refitted by a policy that is sharded too.
With `reload` linear layers are packed, and the head is asked for what it computes with halved weights.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tests.generation.vllm_engine.policy import changed


def main(rank: int, ranks: int, port: int, update: str, folders: list[Path]) -> None:
    import vllm.v1.worker.cpu.shm  # noqa: F401 - turns calls for an accelerator into nothing, as workers do
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    import nemorl.session.vllm_worker as worker

    torch.set_num_threads(1)

    def loaded(folder: Path) -> tuple[Any, Any]:
        """vLLM's configuration and the model."""
        config = EngineArgs(
            model=str(folder), skip_tokenizer_init=True, dtype="float32" if ranks == 1 else "bfloat16",
            enforce_eager=True, max_model_len=64, tensor_parallel_size=ranks,
            distributed_executor_backend="mp", kv_cache_memory_bytes=2**20,
        ).create_engine_config()  # fmt: skip
        with set_current_vllm_config(config):
            if folder == folders[0]:
                os.environ["VLLM_DIST_IDENT"] = str(port)  # names what the ranks share
                init_distributed_environment(ranks, rank, f"tcp://127.0.0.1:{port}", rank, "gloo")
                initialize_model_parallel(ranks, 1, backend="gloo")
            return config, get_model(vllm_config=config)

    for folder in folders:
        config, model = loaded(folder)
        learned = worker._learned.get("model")
        with set_current_vllm_config(config):
            judge = packed_report if update == "reload" else report
            told = judge(folder, config, model, learned)
        if ranks > 1:
            with TemporaryDirectory() as place:
                other = changed(folder, Path(place) / "changed")
                _, direct = loaded(other)
                with set_current_vllm_config(config):
                    told |= refit_report((folder, other), config, (model, direct), learned)
        sys.stdout.write(f"REPORT {json.dumps(told)}\n")
        sys.stdout.flush()


def report(folder: Path, config: Any, model: Any, learned: Any) -> dict[str, Any]:
    """What the layout says and whether it brings the weights back."""
    from nemorl.generation.vllm_engine.weights import WHOLE, WorkerWeights, layout_of
    from nemorl.models.hf_folder import HfFolder
    from nemorl.models.layout import hf_tensors
    from nemorl.models.shape import ModelShape

    layout = layout_of(learned, hf_tensors(ModelShape.load(folder)), "staged")
    weights = WorkerWeights(model, layout, reloading(config, model), False, config.model_config.dtype)
    loaded = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    direct = [part for part in layout.slices if not part.param.startswith(WHOLE)]
    covered = sum(part.num_elements for part in direct)
    padding = sum(int((loaded[name] == 0).sum()) for name in {part.param for part in direct})
    tensors = weights.tensors()
    with torch.no_grad():
        for parameter in [*tensors.values(), *model.parameters()]:
            parameter.zero_()
        HfFolder(folder).load_into(tensors, layout.slices)
        weights.commit()
    now = dict(model.named_parameters())
    return {
        "family": folder.name,
        "copies": len(layout.slices),
        "whole": list(layout.whole),
        "reloaded": sorted(layout.reasons),
        "elements_sent_in_shards": covered,
        "elements_of_parameters": sum(loaded[name].numel() for name in {part.param for part in direct}),
        "zeros": padding,
        "different": [name for name in loaded if not torch.equal(loaded[name], now[name])],
    }


def refit_report(
    folders: tuple[Path, Path], config: Any, models: tuple[Any, Any], learned: Any
) -> dict[str, Any]:
    """What becomes of refits of the first model to the second's weights and back, beside and in place."""
    from nemorl.generation.vllm_engine.weights import WorkerWeights, layout_of
    from nemorl.models.layout import hf_tensors
    from nemorl.models.shape import ModelShape
    from tests.generation.vllm_engine.rank_refits import refits

    model = models[0]
    first, second = ({name: p.detach().clone() for name, p in one.named_parameters()} for one in models)
    reload, dtype = reloading(config, model), config.model_config.dtype
    found = {}
    for update in ("staged", "in_place"):
        layout = layout_of(learned, hf_tensors(ModelShape.load(folders[0])), update)
        weights = WorkerWeights(model, layout, reload, update == "in_place", dtype)
        found[update] = refits(folders, (first, second), model, weights)
    return {"refits": found}


def reloading(config: Any, model: Any) -> Callable[[Any], None]:
    """vLLM's own way to load tensors into a model that is there."""
    from vllm.model_executor.model_loader.reload.inplace import reload_weights

    def reload(tensors: Any) -> None:
        reload_weights(config, model, weights_iterator=tensors, weights_path=None, is_checkpoint_format=True)

    return reload


def packed_report(folder: Path, config: Any, model: Any, learned: Any) -> dict[str, Any]:
    """Whether the head computes with halved weights, once they were reloaded."""
    from nemorl.generation.vllm_engine.trace import LoaderTrace
    from nemorl.generation.vllm_engine.weights import WHOLE, Learned, WorkerWeights, layout_of
    from nemorl.models.hf_folder import HfFolder
    from nemorl.models.layout import hf_tensors
    from nemorl.models.shape import ModelShape

    shapes = hf_tensors(ModelShape.load(folder))
    layout = layout_of(Learned(LoaderTrace((), {}), {}, None), shapes, "reload")
    weights = WorkerWeights(model, layout, reloading(config, model), False, torch.float32)
    tensors = weights.tensors()
    HfFolder(folder).load_into(tensors, layout.slices)
    for tensor in tensors.values():
        tensor.mul_(0.5)
    weights.commit()
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    head = tensors.get(f"{WHOLE}lm_head.weight", tensors[f"{WHOLE}model.embed_tokens.weight"])
    computed = model.lm_head.quant_method.apply(model.lm_head, hidden)[:, : len(head)]
    return {"family": folder.name, "head_error": float((computed - hidden @ head.t()).abs().max())}


if __name__ == "__main__":
    if sys.argv[4] != "reload":
        os.environ["NEMORL_VLLM_PLAIN_WEIGHTS"] = "1"
    os.environ |= {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR",
    }  # fmt: skip
    main(
        int(sys.argv[1]),
        int(sys.argv[2]),
        int(sys.argv[3]),
        sys.argv[4],
        [Path(word) for word in sys.argv[5:]],
    )
