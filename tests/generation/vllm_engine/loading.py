"""A program: vLLM's own model classes in the two ranks of an engine, without the engine.

    python -m tests.generation.vllm_engine.loading RANK MEETING FOLDER...

For every model folder it learns the layout while vLLM loads the model, writes zeros over everything, brings
the weights back by the layout, and says in a line of JSON what came of it: rank 0 first for itself, in
float32, then both next to each other, in bfloat16, where they are then refitted by a policy that is sharded
too. For itself rank 0 also asks heads of packed layers what they compute with weights that were reloaded.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tests.generation.vllm_engine.policy import changed
from tests.generation.vllm_engine.rank_refits import TRANSPORTS

PACKED = ("llama", "qwen3")  # whose heads are tied, and not


def main(rank: int, rendezvous: Path, folders: list[Path]) -> None:
    import vllm.v1.worker.cpu.shm  # noqa: F401 - turns calls for an accelerator into nothing, as workers do
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers import utils

    torch.set_num_threads(1)
    packing = utils.dispatch_cpu_unquantized_gemm
    import nemorl.generation.vllm_engine.worker as worker

    if rank == 0:
        with ranks_of_one_engine(0, 1, rendezvous.with_name("alone")):
            for folder in folders:
                config, model = loaded(folder, 1)
                with set_current_vllm_config(config):
                    tell(report(folder, config, model, worker._learned[worker._POLICY]), 1, 0)
            for folder in (folder for folder in folders if folder.name in PACKED):
                with packing_while_loading(packing):
                    config, model = loaded(folder, 1)
                    with set_current_vllm_config(config):
                        tell(packed_report(folder, config, model), 1, 0)
    with ranks_of_one_engine(rank, 2, rendezvous):
        for folder in folders:
            config, model = loaded(folder, 2)
            learned = worker._learned[worker._POLICY]
            with set_current_vllm_config(config):
                told = report(folder, config, model, learned)
            with TemporaryDirectory() as place:
                other = changed(folder, Path(place) / "changed")
                _, direct = loaded(other, 2)
                transports = TRANSPORTS if folder == folders[0] else TRANSPORTS[:1]
                with set_current_vllm_config(config):
                    told |= refit_report((folder, other), config, (model, direct), learned, transports)
            tell(told, 2, rank)


def loaded(folder: Path, ranks: int) -> tuple[Any, Any]:
    """vLLM's configuration and the model."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import initialize_model_parallel, model_parallel_is_initialized
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    config = EngineArgs(
        model=str(folder), skip_tokenizer_init=True, dtype="float32" if ranks == 1 else "bfloat16",
        enforce_eager=True, max_model_len=64, tensor_parallel_size=ranks,
        distributed_executor_backend="mp", kv_cache_memory_bytes=2**20,
    ).create_engine_config()  # fmt: skip
    with set_current_vllm_config(config):
        if not model_parallel_is_initialized():
            initialize_model_parallel(ranks, 1, backend="gloo")
        return config, get_model(vllm_config=config)


@contextmanager
def ranks_of_one_engine(rank: int, ranks: int, rendezvous: Path) -> Iterator[None]:
    """The groups of vLLM's processes."""
    from vllm.distributed import init_distributed_environment
    from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

    os.environ["VLLM_DIST_IDENT"] = rendezvous.name  # names what the ranks share
    init_distributed_environment(ranks, rank, f"file://{rendezvous}", rank, "gloo")
    yield
    destroy_model_parallel()
    destroy_distributed_environment()


@contextmanager
def packing_while_loading(choice: Any) -> Iterator[None]:
    """Inside, vLLM's loader packs linear layers by its own `choice`, as with `update: reload`."""
    from vllm.model_executor.layers import utils

    own = utils.dispatch_cpu_unquantized_gemm
    utils.dispatch_cpu_unquantized_gemm = choice
    yield
    utils.dispatch_cpu_unquantized_gemm = own


def tell(told: dict[str, Any], ranks: int, rank: int) -> None:
    """Print a report."""
    sys.stdout.write(f"REPORT {json.dumps(told | {'ranks': ranks, 'rank': rank})}\n")
    sys.stdout.flush()


def report(folder: Path, config: Any, model: Any, learned: Any) -> dict[str, Any]:
    """What the layout says, whether it brings the weights back, and what linear layers compute meanwhile."""
    from nemorl.generation.vllm_engine.cpu_linear import PackedLayers
    from nemorl.generation.vllm_engine.weights import WHOLE, WorkerWeights, layout_of
    from nemorl.models.hf_folder import HfFolder
    from nemorl.models.layout import hf_tensors
    from nemorl.models.registry import load_shape

    layout = layout_of(learned, hf_tensors(load_shape(folder)))
    dtype, packed = config.model_config.dtype, PackedLayers(model, eager=True)
    weights = WorkerWeights(model, layout, reloading(config, model), False, dtype, packed)
    assert not PackedLayers(model, eager=False).unread
    loaded = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    direct = [part for part in layout.slices if not part.param.startswith(WHOLE)]
    covered = sum(part.num_elements for part in direct)
    padding = sum(int((loaded[name] == 0).sum()) for name in {part.param for part in direct})
    tensors = weights.tensors()
    with torch.no_grad():
        products = computed(model)
        for tensor in tensors.values():
            tensor.zero_()
        undisturbed = same(products, computed(model))
        for parameter in model.parameters():
            parameter.zero_()
        HfFolder(folder).load_into(tensors, layout.slices)
        weights.commit()
        restored = same(products, computed(model))
    now = dict(model.named_parameters())
    return {
        "family": folder.name,
        "copies": len(layout.slices),
        "whole": list(layout.whole),
        "reloaded": sorted(layout.reasons),
        "elements_sent_in_shards": covered,
        "elements_of_parameters": sum(loaded[name].numel() for name in {part.param for part in direct}),
        "zeros": padding,
        "unread": sorted(packed.unread),
        "products": len(products),
        "product_error": max(error for _, error in products.values()),
        "undisturbed": undisturbed,
        "restored": restored,
        "different": [name for name in loaded if not torch.equal(loaded[name], now[name])],
    }


Products = Mapping[str, tuple[torch.Tensor, float]]


def computed(model: Any) -> Products:
    """Outputs of linear layers, and their relative error relative to a product in float64."""
    found = {}
    for name, module in model.named_modules():
        if hasattr(module, "cpu_linear"):
            weight, bias = module.weight, getattr(module, "bias", None)
            x = torch.randn(3, weight.shape[1], generator=torch.Generator().manual_seed(1)).to(weight.dtype)
            out = module.quant_method.apply(module, x, bias)
            exact = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
            found[name] = out, float((out - exact).norm() / exact.norm())
    return found


def same(first: Products, second: Products) -> bool:
    return all(torch.equal(out, second[name][0]) for name, (out, _) in first.items())


def refit_report(
    folders: tuple[Path, Path],
    config: Any,
    models: tuple[Any, Any],
    learned: Any,
    transports: Sequence[str],
) -> dict[str, Any]:
    """What becomes of refits of the first model to the second's weights and back, next to and in place."""
    from nemorl.generation.vllm_engine.cpu_linear import PackedLayers
    from nemorl.generation.vllm_engine.weights import WorkerWeights, layout_of
    from nemorl.models.layout import hf_tensors
    from nemorl.models.registry import load_shape
    from nemorl.weights.endpoints import WeightReceiver
    from tests.generation.vllm_engine.rank_refits import refits

    model = models[0]
    first, second = ({name: p.detach().clone() for name, p in one.named_parameters()} for one in models)
    reload, dtype = reloading(config, model), config.model_config.dtype
    found = {}
    for update in ("staged", "in_place"):
        layout = layout_of(learned, hf_tensors(load_shape(folders[0])))
        packed = PackedLayers(model, eager=True)
        weights = WorkerWeights(model, layout, reload, update == "in_place", dtype, packed)
        staged = update == "staged"
        receiver = WeightReceiver(
            layout.slices, weights.tensors, lambda _, weights=weights: weights.commit(), in_place=not staged
        )
        loaded = first, second
        found[update] = refits(folders, loaded, model, receiver, transports, other_layouts=staged)
    return {"refits": found}


def reloading(config: Any, model: Any) -> Callable[[Any], None]:
    """vLLM's own way to load tensors into a model that is there."""
    from vllm.model_executor.model_loader.reload.inplace import reload_weights

    def reload(tensors: Any) -> None:
        reload_weights(config, model, weights_iterator=tensors, weights_path=None, is_checkpoint_format=True)

    return reload


def packed_report(folder: Path, config: Any, model: Any) -> dict[str, Any]:
    """Whether the head computes with halved weights, once they were reloaded."""
    from nemorl.generation.vllm_engine.weights import StreamingLoader, end_reload
    from nemorl.models.hf_folder import HfFolder
    from nemorl.models.layout import hf_tensors
    from nemorl.models.registry import load_shape

    files = HfFolder(folder)
    halved = {name: 0.5 * files.tensor(name, size) for name, size in hf_tensors(load_shape(folder)).items()}
    loader = StreamingLoader(model, reloading(config, model), lambda: end_reload(model, config.model_config))
    loader.load(iter(halved.items()))
    loader.finish()
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    head = halved.get("lm_head.weight", halved["model.embed_tokens.weight"])
    computed = model.lm_head.quant_method.apply(model.lm_head, hidden)[:, : len(head)]
    return {"family": folder.name, "head_error": float((computed - hidden @ head.t()).abs().max())}


if __name__ == "__main__":
    os.environ |= {
        "NEMORL_VLLM_LEARNED_LAYOUT": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    main(int(sys.argv[1]), Path(sys.argv[2]), [Path(word) for word in sys.argv[3:]])
