"""What runs in a policy process: the Megatron worker, its batches and its side of the weight exchange."""

from typing import Any

from nemorl.config.policy import PolicyConfig
from nemorl.data.batches import pack_examples, pack_trajectories
from nemorl.data.compared import with_compared
from nemorl.data.losses import Loss
from nemorl.megatron.stats import Evaluation, TrainStats
from nemorl.megatron.worker import PolicyWorker
from nemorl.weights.endpoints import WeightSender
from nemorl.weights.messages import Part, SenderLayout, SendReport
from nemorl.weights.session import RefitSession

from .shard import Shard


class PolicyHost(PolicyWorker):
    """A policy rank as the driver calls it."""

    def __init__(self, config: PolicyConfig, *, rank: int, **options: Any) -> None:
        super().__init__(config, rank=rank, **options)
        self.load_hf(config.model_path)
        # Engines take weights with adapters in them, or adapters: what one does not ask for is not computed.
        self._sender = WeightSender((*self.slices(), *self.adapter_slices()), self.merged_parameters)

    def load_trajectories(self, shard: Shard) -> None:
        """Pack and keep this rank's trajectories; the shard's references have been resolved."""
        batch = pack_trajectories(shard.sequences(), shard.advantages, shard.weights)
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

    def describe_weights(self) -> SenderLayout:
        """What this rank holds, for the plan of the exchange."""
        return self._sender.describe()

    def prepare_refit(self, part: Part) -> None:
        """Keep this rank's part of the plan."""
        self._sender.prepare(part)

    def send_weights(self, session: RefitSession) -> SendReport:
        """This rank's side of a refit."""
        return self._sender.send(session)
