"""Does every family compute on a GPU what it computes on a CPU?

A policy lives the same life in four processes: in float32 and bfloat16, on the CPU and on the GPU. It
computes logprobs of packed sequences and of each alone, decodes with a cache, and takes an optimizer step
with and without recomputation. Float32 differs by the order of sums; bfloat16 by that and by what is rounded.
"""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from gpu_models import FAMILIES, write_random
from gpu_setting import Precision, Row, Setting, policy
from processes import Processes

from nemorl.algorithms.policy_losses import PolicyLoss
from nemorl.config.algorithm.losses import ClipLossConfig
from nemorl.config.policy import AdamConfig, FullRecompute, NoRecompute
from nemorl.data.packed import PackedBatch
from nemorl.megatron.decode import CachedModel
from nemorl.megatron.worker import PolicyWorker
from nemorl.models.kv_cache import Prompt

LENGTHS = (7, 33, 20, 3, 48)
SMALL_FAMILIES = ("llama", "gpt-oss", "deepseek-v3")  # that have little in common
PROMPT = 12  # tokens of a sequence that are read before it is decoded token by token
# Differences counted as equal: of gradient norms relative; of logprobs absolute, the largest in float32 and
# the mean in bfloat16, where one rounding may send a token to other experts. Decoding rounds elsewhere than a
# packed pass: its kernels round the attention of every layer to bfloat16 in another order of sums.
TOLERANCES: dict[Precision, dict[str, float]] = {
    "float32": {"logprobs": 1e-4, "decoded": 1e-4, "grad_norm": 1e-4},
    "bfloat16": {"logprobs": 2e-2, "decoded": 5e-2, "grad_norm": 5e-2},
}
COLUMNS = ("logprob_mean", "logprob_max", "grad_norm", "alone", "decoded", "recomputed")


@dataclass(frozen=True)
class Life:
    """What a policy computed; differences within it are absolute, of logprobs of tokens."""

    refusal: str = ""  # why the project does not compute this here
    problem: str = ""  # why it failed
    logprobs: tuple[float, ...] = ()
    grad_norm: float = 0.0
    alone: tuple[float, ...] = ()  # differences if each sequence has a micro-batch of its own
    decoded: tuple[float, ...] = ()  # and if the longest is decoded
    recomputed: float = 0.0  # relative difference of the gradient norm with full recomputation


def measure(setting: Setting) -> tuple[list[Row], Row]:
    rows = []
    with ExitStack() as stack:
        processes = Processes(partial(start, setting), stack)
        for family in SMALL_FAMILIES if setting.small else FAMILIES:
            config = FAMILIES[family]
            folder = write_random(config, setting.folder / family)
            for precision in TOLERANCES:
                reference = processes.call(f"cpu {precision}", folder)
                found = processes.call(f"{setting.device} {precision}", folder)
                row = compared(reference, found, precision)
                rows.append({"family": family, "precision": precision, **row})
    return rows, {"tolerances": TOLERANCES, "lengths": LENGTHS}


def compared(reference: Life, found: Life, precision: Precision) -> Row:
    """One row: differences between the processes, within the second one, and whether all are small."""
    if problem := reference.problem or found.problem:
        return dict.fromkeys(COLUMNS, "") | {"equal": "NO", "note": problem}
    if refusal := reference.refusal or found.refusal:
        return dict.fromkeys(COLUMNS, "") | {"equal": "refused", "note": refusal}
    between = np.abs(np.array(reference.logprobs) - found.logprobs)
    statistic = np.max if precision == "float32" else np.mean
    row: Row = {
        "logprob_mean": float(np.mean(between)),
        "logprob_max": float(np.max(between)),
        "grad_norm": abs(found.grad_norm - reference.grad_norm) / reference.grad_norm,
        "alone": float(statistic(found.alone)),
        "decoded": float(statistic(found.decoded)),
        "recomputed": found.recomputed,
    }
    limits = TOLERANCES[precision]
    equal = max(float(statistic(between)), row["alone"]) <= limits["logprobs"]
    equal &= row["decoded"] <= limits["decoded"]
    equal &= max(row["grad_norm"], row["recomputed"]) <= limits["grad_norm"]
    return row | {"equal": "yes" if equal else "NO", "note": ""}


def start(setting: Setting, side: str) -> "Side":
    """A side of the comparison, in its process."""
    device, precision = side.split()
    return Side(replace(setting, device=device), precision)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Side:
    setting: Setting
    precision: Precision

    def __call__(self, folder: Path) -> Life:
        try:
            return self._live(folder)
        except ValueError as error:  # no kernel of this device takes it
            return Life(refusal=str(error).partition("\n")[0])
        except RuntimeError as error:  # of CUDA
            return Life(problem=str(error).partition("\n")[0])

    def _live(self, folder: Path) -> Life:
        everything = [list(range(len(LENGTHS)))]
        with policy(self.setting, folder, **self._fields(recompute=True)) as worker:
            recomputed = self._step(worker, everything)
        with policy(self.setting, folder, **self._fields()) as worker:
            worker.load_batch(batch())
            packed = logprobs(worker, everything)
            alone = logprobs(worker, [[i] for i in everything[0]])
            decoded = decode(worker)
            grad_norm = self._step(worker, everything)
        longest = slice(sum(LENGTHS[:-1]) + PROMPT, None)  # the last one
        return Life(
            logprobs=tuple(packed.tolist()),
            grad_norm=grad_norm,
            alone=tuple((packed - alone).abs().tolist()),
            decoded=tuple((packed[longest] - decoded).abs().tolist()),
            recomputed=abs(recomputed - grad_norm) / grad_norm,
        )

    def _fields(self, *, recompute: bool = False) -> Row:
        return {
            "has_weights": True,
            "precision": self.precision,
            "max_sequence_length": 64,
            "micro_batch_tokens": 128,
            "logprob_chunk_tokens": 32,
            "optimizer": AdamConfig(lr=1e-3),
            "recompute": FullRecompute(name="full") if recompute else NoRecompute(),
        }

    def _step(self, worker: PolicyWorker, micro_batches: list[list[int]]) -> float:
        worker.load_batch(batch())
        return worker.train(micro_batches, PolicyLoss(ClipLossConfig())).grad_norm


def batch() -> PackedBatch:
    """Ragged sequences of which all but the first two tokens were sampled."""
    drawn, total = torch.Generator().manual_seed(3), sum(LENGTHS)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    mask = positions >= 2
    return PackedBatch(
        tokens=torch.randint(256, (total,), generator=drawn),
        cu_seqlens=torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32),
        position_ids=positions,
        loss_mask=mask,
        weights=mask / mask.sum(),
        advantages=torch.randn(total, generator=drawn) * mask,
        logprobs=-5.5 * mask,
    )


def logprobs(worker: PolicyWorker, micro_batches: list[list[int]]) -> torch.Tensor:
    worker.compute_logprobs(micro_batches, old=True, reference=False)
    found = worker.batch.old_logprobs
    assert found is not None
    return found


def decode(worker: PolicyWorker) -> torch.Tensor:
    """Logprobs of the last sequence's tokens behind `PROMPT`, decoded one by one."""
    tokens = batch().tokens[-LENGTHS[-1] :].tolist()
    (module,) = worker._modules
    model = CachedModel(module, worker._maker, worker._shape.vocab_size, max_tokens=4096)
    model.cache.reserve(1, len(tokens))
    logits = [model.prefill([Prompt(np.array(tokens[:PROMPT], np.int32), [0])])]
    logits += [model.decode([tokens[place]], [place], [1]) for place in range(PROMPT, len(tokens) - 1)]
    rows = torch.cat([row for row in logits if row is not None]).log_softmax(-1).cpu()
    return rows[torch.arange(len(rows)), torch.tensor(tokens[PROMPT:])]
