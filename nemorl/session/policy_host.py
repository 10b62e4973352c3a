"""What runs in a policy process: the Megatron worker, its batches and its side of the weight exchange."""

from pathlib import Path
from typing import Any

from nemorl.cluster.mesh import Mesh
from nemorl.config.policy import PolicyConfig
from nemorl.data.batches import pack_examples, pack_trajectories
from nemorl.data.losses import Loss
from nemorl.megatron.worker import PolicyWorker, TrainStats
from nemorl.models.layout import PolicyRank, policy_slices
from nemorl.models.shape import ModelShape
from nemorl.models.slices import TensorSlice
from nemorl.weights.endpoints import Part, SendReport, WeightSender
from nemorl.weights.session import RefitSession

from .export import export_hf
from .shard import Shard


class PolicyHost(PolicyWorker):
    """A policy rank as the driver calls it."""

    def __init__(self, config: PolicyConfig, *, rank: int, **options: Any) -> None:
        super().__init__(config, rank=rank, **options)
        self._policy_config = config
        self.load_hf(config.model_path)
        self._sender = WeightSender(rank, self.slices(), self.parameters)

    def load_trajectories(self, shard: Shard) -> None:
        """Pack and keep this rank's trajectories; the shard's references have been resolved."""
        self.load_batch(pack_trajectories(shard.sequences(), shard.advantages, shard.weights))

    def load_examples(self, shard: Shard) -> None:
        """Pack and keep this rank's SFT examples."""
        self.load_batch(pack_examples(shard.sequences(), shard.weights))

    def train_on(self, micro_batches: list[list[int]], loss: Loss) -> TrainStats:
        """`train` with this rank's share of the minibatch first, as sharded calls give it."""
        return self.train(loss, micro_batches)

    def describe_weights(self) -> tuple[TensorSlice, ...]:
        """What this rank holds, for the plan of the exchange."""
        return self._sender.describe()

    def prepare_refit(self, part: Part) -> None:
        """Keep this rank's part of the plan."""
        self._sender.prepare(part)

    def send_weights(self, session: RefitSession) -> SendReport:
        """This rank's side of a refit."""
        return self._sender.send(session)

    def export_hf(self, out: Path) -> None:
        """Write the current weights as a Hugging Face folder; collective."""
        mesh = Mesh.of(self._policy_config.layout)
        shape = ModelShape.load(self._policy_config.model_path)
        ranks = [
            policy_slices(
                shape, PolicyRank(mesh.tp_rank(rank), mesh.tensor, mesh.pp_rank(rank), mesh.pipeline)
            )
            for rank in range(mesh.world_size)
        ]
        export_hf(out, self._policy_config.model_path, ranks, self.parameters())
