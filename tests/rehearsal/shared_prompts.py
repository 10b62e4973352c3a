"""A rehearsal whose sequences have prompts in common."""

from dataclasses import replace
from unittest import mock

import torch

from nemorl.config.experiment import Experiment
from nemorl.data.packed import PackedBatch
from nemorl.megatron.packing import MicroBatchMaker
from nemorl.rehearsal.worker import Load, RankReport, rehearse


def rehearse_with_shared_prompts(experiment: Experiment, rank: int) -> tuple[RankReport, set[bool]]:
    """The first half of all sequences is the same; whether micro-batches share tokens."""
    of_load, make, are_trees = Load.batch, MicroBatchMaker.make, set[bool]()

    def batch(load: Load, vocab_size: int) -> PackedBatch:
        apart = of_load(load, vocab_size)
        prompt = torch.arange(load.lengths[0] // 2) % vocab_size
        tokens = torch.cat(
            [torch.cat((prompt, part[len(prompt) :])) for part in apart.tokens.split(load.lengths)]
        )
        tokens[apart.position_ids == len(prompt)] = torch.arange(len(load.lengths))
        return replace(apart, tokens=tokens)

    def made(maker, batch, sequences):
        micro = make(maker, batch, sequences)
        are_trees.add(micro.layout.is_tree)
        return micro

    with mock.patch.object(Load, "batch", batch), mock.patch.object(MicroBatchMaker, "make", made):
        return rehearse(experiment, rank), are_trees
