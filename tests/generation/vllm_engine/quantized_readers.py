"""A program: what vLLM's readers of quantized folders expect, without a kernel and without a GPU.

    python -m tests.generation.vllm_engine.quantized_readers CONFIGS LAYERS

CONFIGS is JSON, a `quantization_config` for each format; LAYERS are names. The line READERS has the layers
that stay as they are, and for formats of modelopt shape and type of the tensors of a weight [256, 512].
"""

import json
import os
import sys
import tempfile
from typing import Any


def main(configs: dict[str, Any], layers: list[str]) -> None:
    import torch
    import vllm.v1.worker.cpu.shm  # noqa: F401 - turns calls for an accelerator into nothing, as workers do
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.layers.quantization import get_quantization_config, modelopt
    from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer

    os.environ["VLLM_DIST_IDENT"] = "readers"
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
        initialize_model_parallel(1, 1, backend="gloo")
        schemes = {
            kind.key: kind for kind in modelopt.QuantKeyScheme.__subclasses__() if hasattr(kind, "key")
        }
        for format, config in configs.items():
            name = config["quant_method"]
            if name == "compressed-tensors":
                reader: Any = get_quantization_config(name).from_config(config)
                found[format] = {"ignored": [at for at in layers if should_ignore_layer(at, reader.ignore)]}
                continue
            for other in ("modelopt", "modelopt_fp4"):  # as vLLM finds the reader of an algorithm
                name = get_quantization_config(other).override_quantization_method(config, None) or name
            reader = get_quantization_config(name).from_config(config)
            spec, context, _ = modelopt.resolve(config["quant_algo"], reader, layers[0])
            layer, shapes = torch.nn.Module(), modelopt.Shapes([256], 512, torch.bfloat16)
            schemes[spec.weight]().create_weights(layer, modelopt.WEIGHT, context, shapes, lambda *_: None)
            found[format] = {
                "ignored": [at for at in layers if reader.is_layer_excluded(at)],
                "tensors": {at: [list(p.shape), str(p.dtype)] for at, p in layer.named_parameters()},
            }
    sys.stdout.write(f"\nREADERS {json.dumps(found)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*(json.loads(argument) for argument in sys.argv[1:]))
