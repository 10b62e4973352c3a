"""What layers keep for the backward pass on a CPU, next to the plan of memory."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from nemorl.megatron.worker import PolicyWorker
from nemorl.models.registry import load_shape
from nemorl.plan.memory import ITEM_SIZE, kept_elements
from tests.megatron.cases import LOSS_WITHOUT_REFERENCE
from tests.megatron.examples import CONFIGS, policy_config, ragged_batch

LENGTHS = (40,) * 8


def kept_bytes(worker: PolicyWorker) -> int:
    """Bytes of distinct tensors that autograd keeps in a training step, without weights."""
    worker.load_batch(ragged_batch(LENGTHS))
    sizes: dict[int, int] = {}
    kept: list[Tensor] = []  # so that no address is used twice
    weights = {weight.untyped_storage().data_ptr() for weight in worker.parameters().values()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept.append(tensor)
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        worker.train([list(range(len(LENGTHS)))], LOSS_WITHOUT_REFERENCE)
    return sum(sizes.values())


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_layers_keep_what_is_planned(
    start_here: Callable[..., PolicyWorker], tmp_path: Path, family: str, precision: str
) -> None:
    """Four layers more of a model. Norms and gates of operators keep more than fused ones do."""
    tokens, measured, planned, fused = sum(LENGTHS), [], [], []
    for layers in (2, 6):
        sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": layers, "head_dim": 64}
        config = type(CONFIGS[family])(**{**CONFIGS[family].to_dict(), **sizes, "layer_types": None})
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / str(layers))
        policy = policy_config(
            tmp_path / str(layers),
            precision=precision,
            micro_batch_tokens=tokens,
            logprob_chunk_tokens=tokens,
        )
        worker = start_here(policy)
        measured.append(kept_bytes(worker))
        worker.close()
        shape, item = load_shape(policy.model_path, policy.head), ITEM_SIZE[policy.precision]
        planned.append(kept_elements(shape, policy, 0, tokens, 1, fused=False).on_device * item)
        fused.append(kept_elements(shape, policy, 0, tokens, 1).on_device * item)

    assert planned[1] - planned[0] == pytest.approx(measured[1] - measured[0], rel=0.03)
    assert fused[1] - fused[0] < measured[1] - measured[0]
