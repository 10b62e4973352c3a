"""A policy of two ranks, in threads, that has the weights of a folder; and folders that differ a little."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from nemorl.config.policy import LayoutConfig
from nemorl.models.eagle3 import read_head
from nemorl.models.eagle3_shape import SENT, Eagle3Shape
from nemorl.models.hf_folder import HfFolder
from nemorl.models.layout import policy_rank, policy_slices
from nemorl.models.registry import load_shape
from nemorl.models.shape import ModelShape
from nemorl.models.slices import TensorSlice
from nemorl.weights.endpoints import WeightSender
from nemorl.weights.messages import ReceiverLayout, combine, fingerprint
from tests.weights.ranks import Threads, allocate

HEAD = "head"  # the folder of a head for drafts, in that of a model
SHARE = 0.02  # of the elements of a folder that `changed` changes
_TP2 = LayoutConfig(tensor_parallel_size=2)
_TP2_EP2 = LayoutConfig(tensor_parallel_size=2, expert_parallel_size=2, sequence_parallel=True)
_OF_ALL = {
    "one process": LayoutConfig(),
    "PP2": LayoutConfig(pipeline_parallel_size=2),
    "DP2": LayoutConfig(data_parallel_size=2),
}
_OF_MIXTURES = {
    "EP2 of DP2": LayoutConfig(data_parallel_size=2, expert_parallel_size=2),
    "ETP2": LayoutConfig(tensor_parallel_size=2, expert_tensor_parallel_size=2, sequence_parallel=True),
}


class _Rank:
    def __init__(
        self, shape: ModelShape, layout: LayoutConfig, number: int, head: Eagle3Shape | None
    ) -> None:
        self.slices = policy_slices(shape, policy_rank(layout, number))
        of_head = [] if head is None else head.sent_tensors().items()
        of_head = [TensorSlice.whole(name, extents) for name, extents in of_head]
        self.parameters = allocate([*self.slices, *of_head], torch.float32)
        self.exchange = WeightSender([*self.slices, *of_head], lambda: self.parameters)


class Policy(Threads):
    """Float32, as master weights are. Where no layout is given, two ranks share every matrix, and experts.

    Of a folder with a head for drafts in `HEAD` all ranks have that.
    """

    def __init__(self, folder: Path, layout: LayoutConfig | None = None) -> None:
        shape = load_shape(folder, with_mtp=True)
        layout = layout or (_TP2 if shape.moe is None else _TP2_EP2)
        self._head = None
        if (folder / HEAD).is_dir():
            self._head = Eagle3Shape.read(folder / HEAD, shape.num_layers)
        super().__init__([_Rank(shape, layout, number, self._head) for number in range(layout.world_size)])
        self.load(folder)

    def load(self, folder: Path) -> None:
        """Have the weights of a folder of the same model."""
        for rank in self.ranks:
            HfFolder(folder).load_into(rank.parameters, rank.slices)
            if self._head is not None:
                for name, tensor in read_head(folder / HEAD, self._head).items():
                    rank.parameters[SENT + name].view_as(tensor).copy_(tensor)


def other_layouts(folder: Path) -> dict[str, LayoutConfig]:
    """Of a policy of this model, by name: those that `Policy` has not on its own."""
    return _OF_ALL if load_shape(folder).moe is None else _OF_ALL | _OF_MIXTURES


def changed(folder: Path, into: Path) -> Path:
    """The model with other values in a fiftieth of the places of each tensor, in any type."""
    shutil.copytree(folder, into)
    generator = torch.Generator().manual_seed(5)
    for file in sorted(folder.rglob("model.safetensors")):
        tensors = load_file(file)
        for tensor in tensors.values():
            places = torch.rand(tensor.shape, generator=generator) < SHARE
            tensor[places] *= 1.05
        save_file(tensors, into / file.relative_to(folder), metadata={"format": "pt"})
    return into


def fingerprints(folder: Path, layout: ReceiverLayout) -> dict[str, int]:
    """Of each tensor, what an engine's rank has of it once it holds the folder's weights."""
    sums: dict[str, list[int]] = {}
    for part, dtype in zip(layout.slices, layout.dtypes, strict=True):
        whole = torch.empty(part.shape, dtype=getattr(torch, dtype))
        HfFolder(folder).load_into({part.name: whole}, [TensorSlice.whole(part.name, part.shape)])
        sums.setdefault(part.name, []).append(fingerprint(whole[part.box], part.start, part.shape))
    return {name: combine(found) for name, found in sums.items()}


def all_fingerprints(folder: Path, layouts: Sequence[ReceiverLayout]) -> list[dict[str, int]]:
    """The same of each rank."""
    return [fingerprints(folder, layout) for layout in layouts]
