"""The driver's handle on a model: batches laid over its ranks, one call for every stage."""

from collections.abc import Sequence, Set
from itertools import chain
from typing import Any, Literal

from nemorl.cluster.group import WorkerGroup
from nemorl.config.auxiliary import EndpointTeacherConfig
from nemorl.config.policy import PolicyConfig
from nemorl.config.run import DeadlineConfig
from nemorl.data.losses import Loss, SequenceFigure, TokenEstimator
from nemorl.data.micro_batches import BatchPlan, packing_figures, plan_batch
from nemorl.megatron.stats import Evaluation, LogprobStats, TrainStats, ValueStats
from nemorl.models.shape import ModelShape

from .columns import Column, Field, column_of, column_shards
from .held_model import GRACE_SECONDS, HeldModel
from .shard import SequencePlace, make_shards


class ModelGroup(HeldModel):
    """A model as it computes: the policy, a critic, a reference, a teacher."""

    def __init__(
        self, group: WorkerGroup, config: PolicyConfig, deadlines: DeadlineConfig, *, trains: bool
    ) -> None:
        super().__init__(group, config, deadlines, trains=trains)
        self._hidden_size = ModelShape.load(self._config.model_path, self._config.head).hidden_size
        self._plan: BatchPlan | None = None
        self._lengths: list[int] = []  # tokens of the loaded sequences

    async def load(
        self,
        sequences: Sequence[SequencePlace],
        *,
        kind: Literal["trajectories", "examples"],
        num_minibatches: int = 1,
    ) -> None:
        """Lay a batch over the data-parallel ranks; every rank fetches its sequences and keeps them."""
        layout = self._config.layout
        interleaved = layout.virtual_pipeline_parallel_size > 1
        self._lengths = [s.num_tokens for s in sequences]
        self._plan = plan_batch(
            self._lengths,
            self.group.mesh.data,
            num_minibatches,
            self._config.micro_batch_tokens,
            self._hidden_size,
            fewest=layout.pipeline_parallel_size if interleaved else 1,
            units=[-place if s.compared is None else s.compared.unit for place, s in enumerate(sequences, 1)],
        )
        await self.group.call_sharded_async(
            f"load_{kind}",
            make_shards(sequences, self._plan),
            stage="loading a batch",
            deadline_seconds=self._deadlines.logprobs,
            resolve=True,
        )

    async def take_advantages(self, sequences: Sequence[SequencePlace]) -> None:
        """New advantages for the loaded batch, which is of these sequences."""
        await self._sharded("take_advantages", make_shards(sequences, self._loaded()), stage="advantages")

    async def share(self, field: Field) -> Column:
        """A field of the loaded batch, for another group that has loaded the same sequences."""
        outputs = self.group.mesh.output_ranks
        stores = await self.group.call_sharded_async(
            "share",
            [rank in outputs for rank in range(self.group.mesh.world_size)],
            field,
            stage=field,
            deadline_seconds=self._deadlines.logprobs,
            axis="rank",
            outputs="output_ranks",
        )
        return column_of(stores, self._loaded())

    async def take(self, field: Field, column: Column) -> None:
        """Fill a field of the loaded batch with what another group has shared."""
        await self._sharded("take", column_shards(column, self._loaded()), field, stage=field)

    async def estimate(self, estimator: TokenEstimator) -> dict[str, float]:
        """Compute the batch's `advantages`, and `returns` for a critic; figures."""
        figures = await self.group.call_async(
            "estimate", estimator, stage="advantages", deadline_seconds=self._deadlines.logprobs
        )
        return figures[0]  # type: ignore[no-any-return]

    async def sequence_figures(self, figure: SequenceFigure) -> list[float]:
        """A number for each loaded sequence, in the order of `load`."""
        plan = self._loaded()
        figures = await self.group.call_async(
            "sequence_figures",
            figure,
            stage="advantages",
            deadline_seconds=self._deadlines.logprobs,
            outputs="output_ranks",
        )
        found = dict(zip(chain(*plan.ranks), chain(*figures), strict=True))
        return [found[place] for place in range(len(found))]

    async def _sharded(self, method: str, shards: Sequence[Any], *args: Any, stage: str) -> None:
        await self.group.call_sharded_async(
            method, shards, *args, stage=stage, deadline_seconds=self._deadlines.logprobs, resolve=True
        )

    def packing_figures(self) -> dict[str, float]:
        """How evenly the loaded batch is spread, and how full its micro-batches are."""
        return packing_figures(
            self._loaded(), self._lengths, self._config.micro_batch_tokens, self._hidden_size
        )

    async def logprobs(self, *, old: bool, reference: bool, entropy: bool = False) -> LogprobStats:
        """Compute the batch's `old_logprobs` and `reference_logprobs`, which stay on the workers.

        With `entropy` also `old_entropies`, which belong to the old logprobs.
        """
        await self.come_back()
        stats = await self.group.call_sharded_async(
            "compute_logprobs",
            self._batches(),
            stage="logprobs",
            deadline_seconds=self._deadlines.logprobs,
            old=old,
            reference=reference,
            entropy=entropy,
        )
        return stats[0]  # type: ignore[no-any-return]

    async def values(self) -> ValueStats:
        """Compute the batch's `values`, of a critic; they stay on the workers until they are shared."""
        await self.come_back()
        stats = await self.group.call_sharded_async(
            "compute_values", self._batches(), stage="values", deadline_seconds=self._deadlines.logprobs
        )
        return stats[0]  # type: ignore[no-any-return]

    async def top(self, k: int) -> None:
        """Compute the batch's `top_ids` and `top_logprobs`, which stay on the workers."""
        await self.come_back()
        await self.group.call_sharded_async(
            "compute_top", self._batches(), k, stage="logprobs", deadline_seconds=self._deadlines.logprobs
        )

    async def ask_teacher(
        self, config: EndpointTeacherConfig, name: str, taught: Set[int], top_k: int | None
    ) -> None:
        """Let a server say what it thinks of the loaded sequences with these numbers.

        It fills their `reference_logprobs`, or their `top_ids` and `top_logprobs`, on the output ranks, which
        may then share them.
        """
        numbers: list[list[int]] = [[] for _ in range(self.group.mesh.world_size)]
        for rank, held in zip(self.group.mesh.output_ranks, self._loaded().ranks, strict=True):
            numbers[rank] = [row for row, place in enumerate(held) if place in taught]
        seconds = self._deadlines.logprobs
        await self.group.call_sharded_async(
            "ask_teacher",
            numbers,
            config,
            name,
            top_k,
            seconds,
            stage="teachers",
            deadline_seconds=seconds + GRACE_SECONDS,
            axis="rank",
        )

    async def train(self, loss: Loss, minibatch: int = 0) -> TrainStats:
        """One optimizer step over a minibatch of the loaded batch."""
        await self.come_back()
        stats = await self.group.call_sharded_async(
            "train_on",
            self._loaded().minibatches[minibatch],
            loss=loss,
            stage="training",
            deadline_seconds=self._deadlines.training,
        )
        return stats[0]  # type: ignore[no-any-return]

    async def evaluate(self, loss: Loss) -> Evaluation:
        """The loss of the whole loaded batch under the weights as they are."""
        await self.come_back()
        figures = await self.group.call_sharded_async(
            "evaluate_on",
            self._batches(),
            loss=loss,
            stage="validation",
            deadline_seconds=self._deadlines.training,
        )
        return figures[0]  # type: ignore[no-any-return]

    async def sequence_logprobs(self, *, reference: bool) -> list[float]:
        """The summed logprobs of each loaded sequence's learnt tokens, in the order of `load`.

        Under the weights as they are, or under the reference's.
        """
        await self.come_back()
        plan = self._loaded()
        sums = await self.group.call_sharded_async(
            "sequence_logprobs",
            self._batches(),
            reference=reference,
            stage="logprobs",
            deadline_seconds=self._deadlines.logprobs,
            outputs="output_ranks",
        )
        found = dict(zip(chain(*plan.ranks), chain(*sums), strict=True))
        return [found[place] for place in range(len(found))]

    def _batches(self) -> list[list[list[int]]]:
        """[rank][micro-batch] of all minibatches together."""
        plan = self._loaded()
        return [
            [batch for minibatch in plan.minibatches for batch in minibatch[rank]]
            for rank in range(self.group.mesh.data)
        ]

    def _loaded(self) -> BatchPlan:
        if self._plan is None:
            raise RuntimeError("no batch was loaded: call load before logprobs and train")
        return self._plan
