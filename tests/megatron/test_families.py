"""Every family in real processes: its logits, and its weights through the ranks of a layout and back."""

import itertools

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig

from nemorl.config.policy import AdamConfig
from nemorl.models import registry
from nemorl.models.tensors import local_view
from tests.megatron.cases import LOSS, partition, start_worker
from tests.megatron.examples import COMMON, FAMILIES, LENGTHS, VOCABULARY, layout, policy_config, ragged_batch
from tests.selection import in_all

DISTINCT_MAPS = tuple(
    name for name in FAMILIES if name not in ("llama", "llama-rope3", "mimo", "deepseek-v3-plain-query")
)
IN_CI = ("llama-tied", "gpt-oss", "qwen3-moe")
# Of layers for further tokens: what these have of the model's.
COPIES = (".4.embed_tokens.weight", ".shared_head.head.weight")
WITH_EXPERTS = ("mixtral", "qwen3-moe", "gpt-oss", "deepseek-v3")


def logits(rank, world_size, rendezvous, config, batch):
    """Of every token of the batch, [N, V], in the batch's order."""
    worker = start_worker(rank, world_size, rendezvous, config)
    micro = worker._maker.make(batch, list(range(batch.num_sequences)))
    (model,) = worker._modules
    with torch.no_grad():
        hidden = model(micro)[: batch.num_tokens, 0]
        values = torch.zeros(batch.num_tokens, VOCABULARY)
        values[micro.places] = hidden @ model.output_weight().t()[:, :VOCABULARY]
    worker.close()
    return values


def held(rank, world_size, rendezvous, config):
    """What a rank read of the folder, as a copy."""
    worker = start_worker(rank, world_size, rendezvous, config)
    parts = [(part, local_view(worker.parameters(), part).clone()) for part in worker.slices()]
    without_place = worker.parameters().keys() - {part.param for part, _ in parts}
    worker.close()
    return parts, without_place


def test_no_family_is_forgotten(model):
    families = {family.architectures[0] for family in registry.FAMILIES}
    assert families == {type(model(name)[0]).__name__ for name in FAMILIES}


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_all_logits_equal_transformers(pool, model, name):
    theirs, folder = model(name)
    batch = ragged_batch()
    (mine,) = pool.run(1, logits, policy_config(folder), batch)
    for start, end in itertools.pairwise(batch.cu_seqlens.tolist()):
        expected = theirs(batch.tokens[start:end].unsqueeze(0)).logits[0]
        torch.testing.assert_close(mine[start:end], expected, atol=1e-4, rtol=0)
    assert batch.num_sequences == len(LENGTHS)


def embedding_rows_that_moved(rank, world_size, rendezvous, config, batch):
    worker = start_worker(rank, world_size, rendezvous, config)
    (name,) = (name for name in worker.parameters() if name.endswith("word_embeddings.weight"))
    before = worker.parameters()[name].clone()
    everything = partition(batch.num_sequences, 3)
    worker.load_batch(batch)
    worker.compute_logprobs(everything, old=True, reference=True)
    worker.train(everything, LOSS)
    moved = (worker.parameters()[name] != before).any(1)
    worker.close()
    return moved[:VOCABULARY]


def test_the_embedding_of_the_padding_token_is_trained_unlike_in_transformers(pool, tmp_path):
    """docs/families.md has the reason."""
    padding, batch = 3, ragged_batch()
    assert (batch.tokens == padding).any()
    torch.manual_seed(5)
    theirs = AutoModelForCausalLM.from_config(LlamaConfig(**COMMON, pad_token_id=padding))
    theirs.get_input_embeddings().weight.data.normal_(std=0.15)
    theirs.save_pretrained(tmp_path)
    theirs(batch.tokens.unsqueeze(0)).logits.logsumexp(-1).sum().backward()
    assert not theirs.get_input_embeddings().weight.grad[padding].any()

    config = policy_config(tmp_path, optimizer=AdamConfig(lr=1e-2, weight_decay=0.0))
    (moved,) = pool.run(1, embedding_rows_that_moved, config, batch)
    assert moved[padding]
    assert not moved[~torch.isin(torch.arange(VOCABULARY), batch.tokens)].any()


@pytest.mark.parametrize(
    "name",
    [
        *IN_CI,
        "mimo-mtp-tied",
        "deepseek-v3-mtp",
        *in_all(*(name for name in DISTINCT_MAPS if name not in IN_CI)),
    ],
)
def test_the_folder_comes_back_bit_by_bit_from_all_ranks(pool, model, name):
    folder = model(name)[1]
    layouts = [layout(tp=2, sp=True, pp=2), layout(tp=2, sp=True), layout(pp=2), layout(pp=2, first=1)]
    layouts += [layout(tp=2, sp=True, pp=2, vpp=2)]
    further = {} if "-mtp" in name else None
    if name.removesuffix("-mtp") in WITH_EXPERTS:
        layouts += [layout(dp=2, ep=2), layout(tp=2, sp=True, dp=2, ep=4)]
    source = load_file(folder / "model.safetensors")
    source = {tensor: values for tensor, values in source.items() if not tensor.endswith(COPIES)}
    for where in layouts:
        gathered = {tensor: torch.full_like(values, torch.nan) for tensor, values in source.items()}
        for parts, without_place in pool.run(
            where.world_size,
            held,
            policy_config(folder, layout=where, multi_token_prediction=further),
        ):
            assert not without_place
            for part, values in parts:
                box = tuple(slice(s, s + n) for s, n in zip(part.start, part.size, strict=True))
                gathered[part.name].view(part.shape)[box] = values
        for tensor, values in source.items():
            assert torch.equal(gathered[tensor], values), (where, tensor)
