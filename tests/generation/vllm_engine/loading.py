"""A program: vLLM's own model classes in the ranks of an engine, without the engine.

    python -m tests.generation.vllm_engine.loading RANK RANKS PORT staged|reload FOLDER...

For every model folder it learns the layout while vLLM loads the model, writes zeros over everything, brings
the weights back by the layout, and says in a line of JSON what came of it. Ranks of one call run beside
each other. With `reload` linear layers are packed, and the head is asked for what it computes with halved
weights.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch


def main(rank: int, ranks: int, port: int, update: str, folders: list[Path]) -> None:
    import vllm.v1.worker.cpu.shm  # noqa: F401 - turns calls for an accelerator into nothing, as workers do
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    import nemorl.session.vllm_worker as worker

    torch.set_num_threads(1)
    for number, folder in enumerate(folders):
        config = EngineArgs(
            model=str(folder), skip_tokenizer_init=True, dtype="float32", enforce_eager=True,
            max_model_len=64, tensor_parallel_size=ranks, distributed_executor_backend="mp",
            kv_cache_memory_bytes=2**20,
        ).create_engine_config()  # fmt: skip
        with set_current_vllm_config(config):
            if number == 0:
                os.environ["VLLM_DIST_IDENT"] = str(port)  # names what the ranks share
                init_distributed_environment(ranks, rank, f"tcp://127.0.0.1:{port}", rank, "gloo")
                initialize_model_parallel(ranks, 1, backend="gloo")
            model = get_model(vllm_config=config)
            judge = packed_report if update == "reload" else report
            sys.stdout.write(f"REPORT {json.dumps(judge(folder, config, model, worker))}\n")
            sys.stdout.flush()


def report(folder: Path, config: Any, model: Any, worker: Any) -> dict[str, Any]:
    """What the layout says and whether it brings the weights back."""
    from vllm.model_executor.model_loader.reload.inplace import reload_weights

    from nemorl.generation.vllm_engine.weights import WHOLE, WorkerWeights, layout_of
    from nemorl.models.hf_folder import HfFolder
    from nemorl.models.layout import hf_tensors
    from nemorl.models.shape import ModelShape

    learned = worker._learned["model"]
    layout = layout_of(learned, hf_tensors(ModelShape.load(folder)), "staged")

    def reload(tensors: Any) -> None:
        reload_weights(config, model, weights_iterator=tensors, weights_path=None, is_checkpoint_format=True)

    weights = WorkerWeights(model, layout, reload, False, torch.float32)
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


def packed_report(folder: Path, config: Any, model: Any, worker: Any) -> dict[str, Any]:
    """Whether the head computes with halved weights, once they were reloaded."""
    from vllm.model_executor.model_loader.reload.inplace import reload_weights

    from nemorl.generation.vllm_engine.trace import LoaderTrace
    from nemorl.generation.vllm_engine.weights import WHOLE, Learned, WorkerWeights, layout_of
    from nemorl.models.hf_folder import HfFolder
    from nemorl.models.layout import hf_tensors
    from nemorl.models.shape import ModelShape

    shapes = hf_tensors(ModelShape.load(folder))
    layout = layout_of(Learned(LoaderTrace((), {}), {}, None), shapes, "reload")

    def reload(tensors: Any) -> None:
        reload_weights(config, model, weights_iterator=tensors, weights_path=None, is_checkpoint_format=True)

    weights = WorkerWeights(model, layout, reload, False, torch.float32)
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
