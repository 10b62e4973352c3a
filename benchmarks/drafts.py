"""How often is a draft of an EAGLE-3 head right while the policy trains, by position in the draft?

    python benchmarks/drafts.py [--sft-steps 150] [--steps 60]

The quickstart's model learns sums by SFT, in which a head is trained next to it in one draft step or in three
(`policy.draft.depth`), and then by GRPO, in which the head is trained further or stays as SFT left it. The
policy is the same in all runs. No engine on a CPU drafts by such heads, so the share is counted where the
head is trained, before each update: on tokens that the policy has just sampled, how often the head's
likeliest token is the policy's, if the tokens of the draft before it were right. A head that is trained in
one step, or not at all, has its other steps measured with weights of a billionth.
"""

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from common import OUT, publish, table_of
from curves import train_in_processes

from nemorl.config.load import load_experiment
from nemorl.megatron.export import export_draft
from nemorl.models.create import create_tiny_model
from nemorl.observe.metrics import StepMetrics

FOLDER = OUT / "drafts"
POSITIONS = (1, 2, 3)
NOTHING = 1e-9
COMMON = (
    "policy.layout.tensor_parallel_size=1",
    "algorithm.validation={at_start: false, at_end: false, period: null}",
    "algorithm.early_stop=null",
)
# Of the head in SFT and in GRPO: the weight of each step's loss relative to the one before, and the rate.
SETTINGS = {
    "one step": (NOTHING, NOTHING, 1e-3),
    "three steps": (0.8, 0.8, 1e-3),
    "three steps, kept from SFT": (0.8, 0.8, NOTHING),
}


def taught(decay: float, steps: int) -> tuple[Path, Path]:
    """Folders of the policy and of its head after SFT."""
    run = FOLDER / f"sft-{decay}"
    overrides = [
        *COMMON,
        f"policy.model_path={FOLDER / 'untrained'}",
        f"policy.schedule.decay_steps={steps}",
        f"policy.schedule.warmup_steps={min(20, steps // 5)}",
        f"policy.draft={{lr: 1e-3, step_decay: {decay}}}",
        f"algorithm.num_steps={steps}",
        f"checkpointing.period={steps}",
    ]
    config = Path("configs/quickstart/sft.yaml")
    train_in_processes(config, run, overrides)
    head = FOLDER / f"head-{decay}"
    policy = load_experiment(config, overrides).policy
    export_draft(run / "checkpoints" / f"step_{steps:08d}", head, policy)
    return run / "hf", head


def followed(name: str, policy: Path, head: Path, decay: float, rate: float, steps: int) -> list[StepMetrics]:
    """The metrics of GRPO."""
    overrides = [
        *COMMON,
        f"policy.model_path={policy}",
        f"policy.draft={{lr: {rate}, step_decay: {decay}, model_path: {head}}}",
        f"algorithm.num_steps={steps}",
        f"checkpointing.period={steps}",
    ]
    run = FOLDER / name.replace(" ", "_").replace(",", "")
    return [
        line for line in train_in_processes(Path("configs/quickstart/grpo.yaml"), run, overrides) if line.step
    ]


def drafted(accuracies: Sequence[float]) -> float:
    """Right tokens of a draft on average: a token counts if all before it are right, too."""
    right, product = 0.0, 1.0
    for accuracy in accuracies:
        product *= accuracy
        right += product
    return right


def row_of(setting: str, lines: Sequence[StepMetrics], part: str) -> dict[str, Any]:
    """Means over some steps."""
    shares = [fmean(line.values[f"draft/accuracy_{k}"] for line in lines) for k in POSITIONS]
    return {
        "head trained in": setting,
        "steps": part,
        **{f"right_{k}": share for k, share in zip(POSITIONS, shares, strict=True)},
        "right_of_a_draft": drafted(shares),
        "reward": fmean(line.values["reward/mean"] for line in lines),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sft-steps", type=int, default=150)
    parser.add_argument("--steps", type=int, default=60, help="of GRPO")
    arguments = parser.parse_args()
    shutil.rmtree(FOLDER, ignore_errors=True)
    create_tiny_model(FOLDER / "untrained")
    models = {decay: taught(decay, arguments.sft_steps) for decay in {d for d, _, _ in SETTINGS.values()}}
    rows, curves = [], {}
    for name, (decay_of_sft, decay, rate) in SETTINGS.items():
        lines = followed(name, *models[decay_of_sft], decay, rate, arguments.steps)
        tenth = max(1, len(lines) // 10)
        rows += [row_of(name, lines[:tenth], "first"), row_of(name, lines[-tenth:], "last")]
        curves[name] = [[line.values[f"draft/accuracy_{k}"] for k in POSITIONS] for line in lines]
    found = {"sft_steps": arguments.sft_steps, "steps": arguments.steps, "rows": rows, "by_step": curves}
    publish("drafts", found, table_of("Drafted tokens that were right", rows))


if __name__ == "__main__":
    main()
