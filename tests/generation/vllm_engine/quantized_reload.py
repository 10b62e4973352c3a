"""A program: a folder in `fp8` in vLLM's loader, then a reload of an update.

    python -m tests.generation.vllm_engine.quantized_reload EXPORTED PLAIN QUANTIZATION UPDATE

EXPORTED and PLAIN are folders of one model, QUANTIZATION is a `QuantizationConfig`, and UPDATE is a file with
other weights and scales. The update comes, and then twice the tensors of EXPORTED, in both orders. The line
RELOADED has the number of parameters that equal those of the loaded folder after each, and the number of all.

No kernel computes: what a CPU lacks is replaced, and experts stay as they are loaded.
"""

import json
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import vllm.v1.worker.cpu.shm  # noqa: F401 - turns calls for an accelerator into nothing, as workers do
from safetensors.torch import load_file
from torch import Tensor
from vllm import _custom_ops
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.quantization import modelopt
from vllm.model_executor.model_loader import get_model, reload
from vllm.model_executor.model_loader.reload import meta

from nemorl.config.quantization import QuantizationConfig
from nemorl.generation.vllm_engine import quantized
from nemorl.models.registry import load_shape


def _scaled(values: Tensor, scale: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
    return (values.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def _replace_kernels() -> None:
    _custom_ops.scaled_fp8_quant = _scaled
    made = meta.materialize_meta_tensor
    meta.materialize_meta_tensor = lambda values: made(values).zero_()  # and not what was there before
    modelopt.ModelOptFp8MoEMethod.process_weights_after_loading = lambda self, layer: None


def main(exported: Path, plain: Path, quantization: QuantizationConfig, update: Path) -> None:
    os.environ["VLLM_DIST_IDENT"] = "reload"
    _replace_kernels()
    shape = load_shape(plain)
    arguments = EngineArgs(model=str(exported), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=64)
    config, found = arguments.create_engine_config(), []
    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
        initialize_model_parallel(1, 1, backend="gloo")
        model = get_model(vllm_config=config)
        loaded = {name: values.detach().clone() for name, values in model.named_parameters()}
        received = _received(exported, plain)
        orders: tuple[Iterable[Any], ...] = (load_file(update).items(), received.items())  # scales come last
        for order in (*orders, reversed(received.items())):
            reload.initialize_layerwise_reload(model)
            model.load_weights(quantized.of_update(shape, quantization, order))
            reload.finalize_layerwise_reload(model, config.model_config)
            now = dict(model.named_parameters())
            found.append(sum(_bits(now[name]).equal(_bits(values)) for name, values in loaded.items()))
    sys.stdout.write(f"\nRELOADED {json.dumps([*found, len(loaded)])}\n")
    sys.stdout.flush()


def _received(exported: Path, plain: Path) -> dict[str, Tensor]:
    """What a worker would have received: unquantized weights, and the scales of the export."""
    scales = load_file(exported / "model.safetensors").items()
    return load_file(plain / "model.safetensors") | {
        name: values.view(1) for name, values in scales if name.endswith(".input_scale")
    }


def _bits(values: Tensor) -> Tensor:
    return values.detach().reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)


if __name__ == "__main__":
    exported, plain, quantization, update = sys.argv[1:]
    config = QuantizationConfig.model_validate_json(quantization)
    main(Path(exported), Path(plain), config, Path(update))
