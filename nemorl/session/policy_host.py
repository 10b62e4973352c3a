"""What runs in a policy process: the Megatron worker, its batches and its side of the weight exchange."""

import asyncio
from dataclasses import replace
from typing import Any

import ray
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from nemorl.cluster.placement import own_gpus
from nemorl.config.auxiliary import EndpointTeacherConfig
from nemorl.config.policy import PolicyConfig
from nemorl.data.batches import pack_examples, pack_trajectories, with_likelihood
from nemorl.data.losses import Loss, SequenceFigure, TokenEstimator
from nemorl.data.packed import with_compared, with_turns
from nemorl.megatron.stats import Evaluation, TrainStats
from nemorl.megatron.worker import PolicyWorker
from nemorl.weights.endpoints import WeightSender
from nemorl.weights.messages import Part, SenderLayout, SendReport
from nemorl.weights.session import RefitSession

from .columns import ColumnShard, Field, rows_of, with_rows
from .endpoints import EndpointTeacher
from .shard import Shard


class PolicyHost(PolicyWorker):
    """A policy rank as the driver calls it."""

    def __init__(self, config: PolicyConfig, *, rank: int, **options: Any) -> None:
        super().__init__(config, rank=rank, **options)
        self.load_hf(config.model_path)
        self._shared: dict[Field, ray.ObjectRef | None] = {}  # references that are held for their readers
        # Engines take weights with adapters in them, or adapters: what one does not ask for is not computed.
        self._sender = WeightSender((*self.slices(), *self.adapter_slices()), self.merged_parameters)

    def gpus(self) -> tuple[str, ...]:
        """What this process computes on, by the names that CUDA_VISIBLE_DEVICES takes."""
        return own_gpus()

    def load_trajectories(self, shard: Shard) -> None:
        """Pack and keep this rank's trajectories; the shard's references have been resolved."""
        batch = pack_trajectories(shard.sequences(), shard.advantages, shard.weights)
        if shard.likelihood is not None:
            batch = with_likelihood(batch, shard.likelihood)
        if shard.rewards is not None:
            batch = with_turns(batch, shard.sequences(), shard.rewards)
        self.load_batch(batch if shard.compared is None else with_compared(batch, shard.compared))

    def load_examples(self, shard: Shard) -> None:
        """Pack and keep this rank's examples."""
        self.load_batch(pack_examples(shard.sequences(), shard.weights, shard.compared))

    def train_on(self, micro_batches: list[list[int]], loss: Loss) -> TrainStats:
        """`train` with this rank's share of the minibatch first, as sharded calls give it."""
        return self.train(loss, micro_batches)

    def evaluate_on(self, micro_batches: list[list[int]], loss: Loss) -> Evaluation:
        """`evaluate` with this rank's share first."""
        return self.evaluate(loss, micro_batches)

    def take_advantages(self, shard: Shard) -> None:
        """New advantages for the batch that was loaded; the rest of it stays as it is."""
        batch = pack_trajectories(shard.sequences(), shard.advantages, shard.weights)
        self._batch = replace(self.batch, advantages=batch.advantages)

    def share(self, mine: bool, field: Field) -> ray.ObjectRef | None:
        """Store a field of the batch for other groups; a reference to its list of arrays, if `mine`."""
        self._shared[field] = ray.put(rows_of(self.batch, field)) if mine else None
        return self._shared[field]

    def take(self, shard: ColumnShard, field: Field) -> None:
        """Fill a field of the batch with what another group has shared."""
        self._batch = with_rows(self.batch, field, shard.rows())

    def estimate(self, estimator: TokenEstimator) -> dict[str, float]:
        """Fill `advantages`, and `returns` for a critic; figures of the estimator."""
        found = estimator(self.batch, self._sum_over_copies)
        self._batch = replace(self.batch, advantages=found.advantages, returns=found.returns)
        return found.figures

    def ask_teacher(
        self,
        sequences: list[int],
        config: EndpointTeacherConfig,
        name: str,
        top_k: int | None,
        seconds: float,
    ) -> None:
        """Fill the teacher's fields of these sequences of the batch with what a server says."""
        if sequences:
            teacher = EndpointTeacher(config, name)
            told = asyncio.run(teacher.tell(self.batch, sequences, top_k, seconds))
            self._batch = replace(self.batch, **told)

    def sequence_figures(self, figure: SequenceFigure) -> list[float]:
        """[S] a number for each sequence of this data-parallel rank."""
        return figure(self.batch).tolist()

    def _sum_over_copies(self, values: Tensor) -> Tensor:
        total = values.to(self.device)
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        return total.cpu()

    def describe_weights(self) -> SenderLayout:
        """What this rank holds, for the plan of the exchange."""
        return self._sender.describe()

    def prepare_refit(self, part: Part) -> None:
        """Keep this rank's part of the plan."""
        self._sender.prepare(part)

    def send_weights(self, session: RefitSession) -> SendReport:
        """This rank's side of a refit."""
        return self._sender.send(session)
