"""How good a trajectory was beside what could be expected."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nemorl.config.algorithm import GroupAdvantageConfig


def group_relative(rewards: Sequence[float], groups: Sequence[int], config: GroupAdvantageConfig) -> Tensor:
    """Advantage of each trajectory against the others of its task: [S] float32.

    `A = (r - mean) / (std + epsilon)` with the mean and the unbiased standard deviation of the group (Shao
    et al. 2024, arXiv 2402.03300, section 4.1.2). With `leave_one_out` the mean is that of the others
    (Ahmadian et al. 2024, arXiv 2402.14740). A group of one, or of equal rewards, has advantage 0.
    """
    r = torch.tensor(rewards, dtype=torch.float64)
    members: dict[int, list[int]] = {}
    for position, group in enumerate(groups):
        members.setdefault(group, []).append(position)
    advantages = torch.zeros_like(r)
    for index in members.values():
        if len(index) < 2:
            continue
        x = r[index]
        centred = x - x.mean()
        if config.leave_one_out:
            centred = centred * len(index) / (len(index) - 1)
        advantages[index] = centred / (x.std() + config.epsilon) if config.normalize else centred
    return advantages.float()
