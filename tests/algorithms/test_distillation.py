"""Losses of distillation against their formulas in float64, and who teaches whom."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from nemorl.algorithms.distillation import (
    DistillationUpdate,
    SampledReverseKL,
    TopDivergence,
    distillation_loss,
    outcomes,
)
from nemorl.algorithms.metrics import optimizer_metrics
from nemorl.algorithms.objective import finish_metrics
from nemorl.algorithms.online import OnlineAlgorithm
from nemorl.algorithms.teachers import EndpointTeacher, Teachers, teachers_of_tasks
from nemorl.config.algorithm import (
    ForwardKlLossConfig,
    IcePopCorrectionConfig,
    JsdLossConfig,
    MixedKlLossConfig,
    NoCorrectionConfig,
    ReverseKlLossConfig,
)
from nemorl.config.auxiliary import EndpointTeacherConfig, ModelTeacherConfig
from nemorl.data.losses import LogprobStats, TrainStats
from nemorl.data.packed import Compared, PackedBatch
from nemorl.data.shards import Column, SequencePlace
from nemorl.errors import RunError
from nemorl.session.session import Session
from nemorl.trajectories import Task
from tests.algorithms.groups import failed, group, trajectory

TOKENS, VOCABULARY, K = 7, 6, 3
MASK = torch.tensor([False, True, True, False, False, True, True])


def distributions():
    """Logits of the policy and logprobs of the teacher at each place [7, 6], float64."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(TOKENS, VOCABULARY, generator=generator).double() * 2
    teacher = (torch.randn(TOKENS, VOCABULARY, generator=generator).double() * 2).log_softmax(-1)
    return logits, teacher


def packed(**fields):
    return PackedBatch(
        tokens=torch.tensor([0, 3, 1, 5, 2, 2, 4]),
        cu_seqlens=torch.tensor([0, 3, 7], dtype=torch.int32),
        position_ids=torch.tensor([0, 1, 2, 0, 1, 2, 3]),
        loss_mask=MASK,
        weights=torch.tensor([0, 0.1, 0.2, 0, 0, 0.3, 0.4]),
        **fields,
    )


def divergence_by_hand(p, q, kind, beta=0.5):
    """Of two lists of probabilities."""

    def kl(a, b):
        return sum(x * math.log(x / y) for x, y in zip(a, b, strict=True))

    if kind == "forward_kl":
        return kl(p, q)
    middle = [beta * x + (1 - beta) * y for x, y in zip(p, q, strict=True)]
    return beta * kl(p, middle) + (1 - beta) * kl(q, middle)


def coarse(p, ids, rest):
    """The probabilities that a loss over `ids` looks at."""
    seen = [float(p[i]) for i in ids]
    if rest == "leave_out":
        return [x / sum(seen) for x in seen]
    return [*seen, 1 - sum(seen)]


@pytest.mark.parametrize("rest", ["one_outcome", "leave_out"])
@pytest.mark.parametrize(
    "config",
    [ForwardKlLossConfig(name="forward_kl"), JsdLossConfig(name="jsd", beta=0.2)],
    ids=lambda config: config.name,
)
def test_top_divergence_and_its_gradient(config, rest):
    logits, teacher = distributions()
    config = config.model_copy(update={"rest": rest})
    ids = teacher.topk(K, dim=-1).indices
    batch = packed(top_ids=ids.int(), top_logprobs=teacher.gather(1, ids).float() * MASK[:, None])
    loss = TopDivergence(config)
    assert torch.equal(loss.candidates(batch), ids)

    z = logits.float().requires_grad_()
    own = torch.cat((batch.tokens[:, None], ids), dim=1)
    found = loss(batch, z.log_softmax(-1).gather(1, own) * MASK[:, None], torch.zeros(TOKENS))
    found.loss.backward()

    def by_hand(z):
        q = z.softmax(-1)
        terms = [
            divergence_by_hand(
                coarse(teacher[i].exp(), ids[i].tolist(), rest),
                coarse(q[i], ids[i].tolist(), rest),
                config.name,
                getattr(config, "beta", 0.0),
            )
            for i in MASK.nonzero().flatten().tolist()
        ]
        return sum(w * t for w, t in zip((0.1, 0.2, 0.3, 0.4), terms, strict=True)), terms

    whole, terms = by_hand(logits)
    assert float(found.loss.detach()) == pytest.approx(whole, rel=1e-4)
    assert float(found.sums[f"distillation/{config.name}"]) == pytest.approx(sum(terms), rel=1e-4)
    step = 1e-5
    for i, j in ((1, 0), (1, int(ids[1, 0])), (2, 3), (6, int(ids[6, 2])), (3, 1)):
        moved = [logits.clone(), logits.clone()]
        moved[0][i, j] += step
        moved[1][i, j] -= step
        slope = (by_hand(moved[0])[0] - by_hand(moved[1])[0]) / (2 * step)
        assert float(z.grad[i, j]) == pytest.approx(slope, rel=1e-3, abs=1e-6)


def of_a_batch(config, logits, teacher, k=K):
    """Loss of a batch in float64, its gradient to the logits [7, 6], and sums."""
    ids = teacher.topk(k, dim=-1).indices
    batch = packed(
        top_ids=ids.int(),
        top_logprobs=teacher.gather(1, ids),
        reference_logprobs=teacher.gather(1, packed().tokens[:, None]).squeeze(1),
    )
    z = logits.clone().requires_grad_()
    q = z.log_softmax(-1)
    own = q.gather(1, batch.tokens[:, None])
    candidates = own.squeeze(1) if config.top_k is None else torch.cat((own, q.gather(1, ids)), dim=1)
    found = distillation_loss(config)(batch, candidates, -(q.exp() * q).sum(-1))
    found.loss.backward()
    return float(found.loss.detach()), z.grad, found.sums


def weighted(terms):
    """Of a function of the place that returns the divergence there, the loss of the batch."""
    weights = packed().weights.double()
    return sum(weights[i] * terms(i) for i in MASK.nonzero().flatten().tolist())


def of_nemo_rl(z, teacher, kind, weight, *, zero_outside):
    """NeMo-RL's DistillationLossFn over the complete vocabulary, from the teacher's logits of the top."""

    def term(i):
        ids = teacher[i].topk(K).indices
        p = teacher[i][ids].softmax(-1)
        if zero_outside:
            log_q, log_p = z[i].log_softmax(-1), torch.full((VOCABULARY,), -100.0).double()
            log_p[ids] = p.log()
            reverse = (log_q.exp() * (log_q - log_p)).sum()
            forward = (p * (p.log() - log_q[ids])).sum()
        else:
            log_q = z[i][ids].log_softmax(-1)
            forward = (p * (p.log() - log_q)).sum()
            reverse = (log_q.exp() * (log_q - p.log())).sum()
        return {"forward": forward, "reverse": reverse, "mixed": weight * forward + (1 - weight) * reverse}[
            kind
        ]

    return weighted(term)


@pytest.mark.parametrize("zero_outside", [True, False])
@pytest.mark.parametrize("kind", ["forward", "reverse", "mixed"])
def test_the_loss_and_gradient_of_nemo_rl(kind, zero_outside):
    logits, teacher = distributions()
    rest = "zero" if zero_outside else "leave_out"
    config = {
        "forward": ForwardKlLossConfig(name="forward_kl", tokens=K, rest=rest),
        "reverse": ReverseKlLossConfig(tokens=K, rest=rest),
        "mixed": MixedKlLossConfig(name="mixed_kl", tokens=K, rest=rest, forward_weight=0.3),
    }[kind]
    loss, grad, sums = of_a_batch(config, logits, teacher)
    z = logits.clone().requires_grad_()
    expected = of_nemo_rl(z, teacher + 1.5, kind, 0.3, zero_outside=zero_outside)
    expected.backward()
    assert loss == pytest.approx(float(expected.detach()), rel=1e-6)
    torch.testing.assert_close(grad, z.grad, rtol=1e-6, atol=1e-9)
    parts = [sums.get(f"distillation/{name}") for name in ("forward_kl", "reverse_kl")]
    if kind == "mixed":
        mixed = sums["distillation/mixed_kl"]
        torch.testing.assert_close(mixed, 0.3 * parts[0] + 0.7 * parts[1])


@pytest.mark.parametrize("updates", ["one", "several"])
def test_the_loss_and_gradient_of_mopd(updates):
    """NeMo-RL's estimator `opd` with REINFORCE and IcePop (arXiv 2601.02780, equations 7 and 8)."""
    logits, teacher = distributions()
    tokens = packed().tokens
    trainer = logits.log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
    engine = trainer + torch.tensor([0, 0.3, -2.0, 0, 0, 2.5, -0.4]).double()
    correction = IcePopCorrectionConfig(name="icepop", low=0.2, high=5.0)
    old = trainer * 0.9 if updates == "several" else None
    z = logits.clone().requires_grad_()
    own = z.log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
    of_teacher = teacher.gather(1, tokens[:, None]).squeeze(1)
    batch = packed(reference_logprobs=of_teacher, logprobs=engine, old_logprobs=old)
    found = SampledReverseKL(correction=correction)(batch, own, torch.zeros(TOKENS).double())
    found.loss.backward()

    exact = logits.clone().requires_grad_()

    def term(i):
        logprob = exact[i].log_softmax(-1)[tokens[i]]
        weight = ((logprob.detach() if old is None else old[i]) - engine[i]).exp()
        weight = weight if 0.2 <= weight <= 5 else 0.0
        return -weight * (of_teacher[i] - logprob).detach() * logprob

    weighted(term).backward()
    torch.testing.assert_close(z.grad, exact.grad, rtol=1e-6, atol=1e-9)
    assert 0 < found.sums["correction/masked"] < MASK.sum()


def of_verl(z, teacher, min_logprob, max_value):
    """verl's `forward_kl_topk` as a loss: clamped logprobs of the complete distributions, nothing scaled."""

    def term(i):
        ids = teacher[i].topk(K).indices
        log_q, log_p = z[i].log_softmax(-1)[ids], teacher[i][ids]
        if min_logprob is not None:
            log_q, log_p = log_q.clamp_min(min_logprob), log_p.clamp_min(min_logprob)
        divergence = (log_p.exp() * (log_p - log_q)).sum().clamp_min(0.0)
        return divergence if max_value is None else divergence.clamp(-max_value, max_value)

    return weighted(term)


@pytest.mark.parametrize(("low", "high"), [(None, None), (-3.0, None), (-3.0, 0.8), (None, 0.8)])
def test_the_top_loss_and_gradient_of_verl(low, high):
    logits, teacher = distributions()
    config = ForwardKlLossConfig(
        name="forward_kl", tokens=K, rest="unscaled", min_logprob=low, max_value=high
    )
    loss, grad, _ = of_a_batch(config, logits, teacher)
    z = logits.clone().requires_grad_()
    expected = of_verl(z, teacher, low, high)
    expected.backward()
    assert loss == pytest.approx(float(expected.detach()), rel=1e-6)
    torch.testing.assert_close(grad, z.grad, rtol=1e-6, atol=1e-9)


def test_a_negative_sum_of_unscaled_terms_counts_as_zero():
    """The policy gives all of the teacher's tokens more than the teacher does at the last two places."""
    logits, teacher = distributions()
    sure = teacher.scatter_add(1, teacher.topk(K, dim=-1).indices, torch.full((TOKENS, K), 2.0).double())
    logits[5:] = sure[5:]
    config = ForwardKlLossConfig(name="forward_kl", tokens=K, rest="unscaled")
    loss, grad, _ = of_a_batch(config, logits, teacher)
    assert loss == pytest.approx(float(of_verl(logits, teacher, None, None)), rel=1e-6)
    assert loss > 0
    assert not grad[5:].any()
    assert grad[1:3].any()


@pytest.mark.parametrize("bound", [None, 0.7])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_sampled_losses_and_gradients_of_verl(estimator, bound):
    """`k1` as the advantage of a clipped policy gradient whose ratio is 1, the others as losses."""
    logits, teacher = distributions()
    loss, grad, _ = of_a_batch(ReverseKlLossConfig(estimator=estimator, max_value=bound), logits, teacher)
    z = logits.clone().requires_grad_()
    tokens = packed().tokens
    bounds = (-math.inf, math.inf) if bound is None else (-bound, bound)

    def term(i):
        logprob = z[i].log_softmax(-1)[tokens[i]]
        x = logprob - teacher[i, tokens[i]]
        if estimator == "k1":
            advantage, ratio = -x.detach().clamp(*bounds), (logprob - logprob.detach()).exp()
            return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
        return {"k2": x.square() / 2, "k3": (-x).exp() - 1 + x}[estimator].clamp(*bounds)

    expected = weighted(term)
    expected.backward()
    assert loss == pytest.approx(float(expected.detach()), rel=1e-6)
    torch.testing.assert_close(grad, z.grad, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    "config",
    [
        ReverseKlLossConfig(tokens=VOCABULARY),
        MixedKlLossConfig(name="mixed_kl", tokens=VOCABULARY, rest="zero"),
        JsdLossConfig(name="jsd", tokens=VOCABULARY, rest="zero", beta=0.2),
    ],
    ids=lambda config: config.name,
)
def test_divergences_over_all_tokens_are_those_of_the_distributions(config):
    logits, teacher = distributions()
    loss, _, _ = of_a_batch(config, logits, teacher, k=VOCABULARY)
    p, q = teacher.exp().tolist(), logits.softmax(-1).tolist()
    forward, reverse = (
        float(weighted(lambda i, a=a, b=b: divergence_by_hand(a[i], b[i], "forward_kl")))
        for a, b in ((p, q), (q, p))
    )
    jsd = float(weighted(lambda i: divergence_by_hand(p[i], q[i], "jsd", 0.2)))
    expected = {"reverse_kl": reverse, "mixed_kl": (forward + reverse) / 2, "jsd": jsd}
    assert loss == pytest.approx(expected[config.name], rel=1e-5)


def test_jensen_shannon_with_a_teacher_that_has_only_the_top():
    """Over the complete vocabulary, in which a token without probability of the teacher has a term."""
    logits, teacher = distributions()
    config = JsdLossConfig(name="jsd", tokens=K, rest="zero", beta=0.2)
    loss, _, _ = of_a_batch(config, logits, teacher)

    def term(i):
        ids = teacher[i].topk(K).indices
        p = torch.zeros(VOCABULARY).double()
        p[ids] = teacher[i][ids].softmax(-1)
        q = logits[i].softmax(-1)
        m = 0.2 * p + 0.8 * q
        forward = (p[ids] * (p[ids] / m[ids]).log()).sum()
        return 0.2 * forward + 0.8 * (q * (q / m).log()).sum()

    assert loss == pytest.approx(float(weighted(term)), rel=1e-6)


def test_top_of_the_whole_vocabulary_is_the_whole_divergence():
    logits, teacher = distributions()
    p, q = (x.float() for x in outcomes(teacher, logits.log_softmax(-1), "one_outcome"))
    whole = (teacher.exp() * (teacher - logits.log_softmax(-1))).sum(-1)
    torch.testing.assert_close((p.exp() * (p - q)).sum(-1).double(), whole, atol=1e-5, rtol=1e-5)


def test_equal_distributions_have_no_divergence_and_no_gradient():
    """Also where almost nothing is outside the top, and where the mask is False."""
    logits = torch.tensor([[12.0, 9.0, 5.0, -20.0, -20.0, -20.0]] * TOKENS, requires_grad=True)
    log_p = logits.log_softmax(-1)
    ids = torch.tensor([[0, 1, 2]] * TOKENS)
    batch = packed(top_ids=ids.int(), top_logprobs=log_p[:, :3].detach() * MASK[:, None])
    logprobs = torch.cat((log_p[:, :1], log_p[:, :3]), dim=1) * MASK[:, None]
    for config in (ForwardKlLossConfig(name="forward_kl"), JsdLossConfig(name="jsd")):
        found = TopDivergence(config)(batch, logprobs, torch.zeros(TOKENS))
        (grad,) = torch.autograd.grad(found.loss, logits, retain_graph=True)
        assert abs(float(found.loss)) < 1e-6
        assert float(grad.abs().max()) < 1e-6


def test_reverse_kl_of_samples_is_the_divergence_in_expectation_with_its_gradient():
    """All tokens of one place, weighed by their probability, instead of draws."""
    logits, teacher = distributions()
    z = logits[1].clone().requires_grad_()
    chances = z.detach().softmax(-1)
    batch = PackedBatch(
        tokens=torch.arange(VOCABULARY),
        cu_seqlens=torch.tensor([0, VOCABULARY], dtype=torch.int32),
        position_ids=torch.arange(VOCABULARY),
        loss_mask=torch.ones(VOCABULARY, dtype=torch.bool),
        weights=chances,
        reference_logprobs=teacher[1],
    )
    found = SampledReverseKL()(batch, z.log_softmax(-1), torch.zeros(VOCABULARY))
    found.loss.backward()

    exact = logits[1].clone().requires_grad_()
    q = exact.log_softmax(-1)
    (q.exp() * (q - teacher[1])).sum().backward()
    assert float(found.loss) == pytest.approx(float((q.exp() * (q - teacher[1])).sum()))
    torch.testing.assert_close(z.grad, exact.grad)


def test_what_the_teacher_would_never_say_is_pushed_away_all_the_same():
    """The divergence from a reference has no gradient beyond ±20."""
    logprobs = torch.full((TOKENS,), -1.0, requires_grad=True)
    of_teacher = torch.tensor([0.0, -31.0, -2.0, 0.0, 0.0, -22.0, -1.0])
    found = SampledReverseKL()(packed(reference_logprobs=of_teacher), logprobs, torch.zeros(TOKENS))
    found.loss.backward()
    x = [0.0, 20.0, 1.0, 0.0, 0.0, 20.0, 0.0]
    weights = packed().weights.tolist()
    assert logprobs.grad.tolist() == pytest.approx([w * v for w, v in zip(weights, x, strict=True)])
    assert float(found.loss.detach()) == pytest.approx(sum(w * v for w, v in zip(weights, x, strict=True)))


@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl", "jsd"])
def test_a_policy_that_samples_comes_to_its_teacher(kind):
    """64 draws at each of two places, 150 times: of the divergence less than a hundredth is left."""
    generator = torch.Generator().manual_seed(0)
    logits, teacher = (values[:2].float() for values in distributions())
    z = logits.clone().requires_grad_()
    optimizer = torch.optim.Adam([z], lr=0.1)
    loss = {
        "reverse_kl": SampledReverseKL(),
        "forward_kl": TopDivergence(ForwardKlLossConfig(name="forward_kl")),
        "jsd": TopDivergence(JsdLossConfig(name="jsd")),
    }[kind]
    draws, at = 64, torch.arange(2).repeat_interleave(64)
    ids = teacher.topk(VOCABULARY, dim=-1).indices

    def divergence():
        q = z.detach().log_softmax(-1)
        return float((q.exp() * (q - teacher)).sum(-1).mean())

    before = divergence()
    for _ in range(150):
        q = z.log_softmax(-1)
        tokens = torch.multinomial(q.detach().exp(), draws, replacement=True, generator=generator).flatten()
        batch = PackedBatch(
            tokens=tokens,
            cu_seqlens=torch.tensor([0, draws, 2 * draws], dtype=torch.int32),
            position_ids=torch.arange(draws).repeat(2),
            loss_mask=torch.ones(2 * draws, dtype=torch.bool),
            weights=torch.full((2 * draws,), 0.5 / draws),
            reference_logprobs=teacher[at, tokens],
            top_ids=ids[at].int(),
            top_logprobs=teacher.gather(1, ids)[at],
        )
        own = q[at, tokens]
        candidates = own if kind == "reverse_kl" else torch.cat((own[:, None], q.gather(1, ids)[at]), dim=1)
        optimizer.zero_grad()
        loss(batch, candidates, torch.zeros(2 * draws)).loss.backward()
        optimizer.step()
    assert before > 1
    assert divergence() < 0.01 * before


def test_metrics_are_means_over_the_sampled_tokens():
    logits, teacher = distributions()
    tokens = packed().tokens[:, None]
    logprobs = (logits.log_softmax(-1).gather(1, tokens).squeeze(1) * MASK).float()
    of_teacher = (teacher.gather(1, tokens).squeeze(1) * MASK).float()
    batch = packed(reference_logprobs=of_teacher, logprobs=logprobs + 0.25 * MASK)
    found = SampledReverseKL()(batch, logprobs, torch.full((TOKENS,), 0.5) * MASK)
    metrics = finish_metrics(
        {name: float(value) for name, value in found.sums.items()},
        {name: float(value) for name, value in found.maxima.items()},
    )
    assert metrics["distillation/reverse_kl"] == pytest.approx(
        float((logprobs - of_teacher)[MASK].mean()), rel=1e-5
    )
    assert metrics["logprob_gap/mean"] == metrics["logprob_gap/max"] == pytest.approx(0.25, rel=1e-5)
    assert metrics["entropy"] == pytest.approx(0.5)
    assert (
        "logprob_gap/mean" not in SampledReverseKL()(replace(batch, logprobs=None), logprobs, of_teacher).sums
    )


def test_teachers_by_a_column():
    tasks = [Task(0, (), columns={"of": "sums"}), Task(1, (), columns={"of": "prose"})]

    def teacher(key=None, default=False):
        return ModelTeacherConfig(model_path=Path("a"), key=key, default=default)

    assert teachers_of_tasks(tasks, "of", {"prose": teacher(), "adder": teacher("sums")}) == [
        "adder",
        "prose",
    ]
    assert teachers_of_tasks(tasks, None, {"prose": teacher()}) == ["prose", "prose"]
    several = {"prose": teacher(), "adder": teacher(("products", "sums"))}
    assert teachers_of_tasks(tasks, "of", several) == ["adder", "prose"]
    with pytest.raises(RunError, match=r"task 1: the column `of`.* is 'prose'.*one of the teachers: sums"):
        teachers_of_tasks(tasks, "of", {"sums": teacher()})
    with pytest.raises(RunError, match=r"task 0: the column `from`.* is missing"):
        teachers_of_tasks(tasks, "from", {"sums": teacher()})


def test_the_default_teacher_has_tasks_of_other_values():
    tasks = [Task(0, (), columns={"of": "poems"}), Task(1, (), columns={"of": "sums"})]
    teachers = {
        "sums": ModelTeacherConfig(model_path=Path("a")),
        "prose": ModelTeacherConfig(model_path=Path("b"), default=True),
    }
    assert teachers_of_tasks(tasks, "of", teachers) == ["prose", "sums"]
    with pytest.raises(RunError, match=r"task 2: the column `of`.* is missing"):
        teachers_of_tasks([*tasks, Task(2, ())], "of", teachers)


def of_updates(number: int) -> Any:
    """The part of a config that an update reads."""
    return SimpleNamespace(
        aggregation="token-mean",
        loss=ReverseKlLossConfig(name="reverse_kl"),
        correction=NoCorrectionConfig(),
        num_minibatches=number,
        needs_old_logprobs=False,
    )


class StandInGroup:
    """A group of processes that says of a sequence `10 * its row`, plus what distinguishes the group."""

    def __init__(self, mark: float) -> None:
        self.mark = mark
        self.loaded: list[list[SequencePlace]] = []
        self.taken: dict[str, list[Any]] = {}
        self.calls: list[Any] = []
        self.devices: Any = None

    async def outlasting(self, work: Callable[[], Awaitable[Any]]) -> Any:
        return await work()

    async def load(self, places: list[SequencePlace], *, kind: str) -> None:
        self.loaded.append(places)

    async def logprobs(self, *, old: bool, reference: bool) -> None:
        assert (old, reference) == (True, False)

    async def top(self, k: int, *, scaled: bool = False, score: object = None) -> None:
        self.calls.append(k)

    async def fill(self, sequences: set[int], compute: EndpointTeacher, *, stage: str) -> None:
        self.calls.append((compute._section, sequences, compute._top_k))

    async def share(self, field: str) -> Column:
        rows = [place.row for place in self.loaded[-1]]
        return Column(tuple(((self.mark, field), 10 * row) for row in rows))

    async def take(self, field: str, column: Column) -> None:
        self.taken[field] = list(column.places)


def ask_teachers(
    top_k: int | None, *, shares_devices: bool
) -> tuple[StandInGroup, StandInGroup, StandInGroup]:
    """Five sequences, by the teachers: sums, prose, sums, far (a server), sums."""
    policy, sums, prose = StandInGroup(0), StandInGroup(1), StandInGroup(2)
    models: Any = {"policy": policy, "teacher_sums": sums, "teacher_prose": prose}
    for model in () if shares_devices else models.values():
        model.devices = model
    session = Session(models=models)
    far = EndpointTeacherConfig(kind="endpoint", base_url="http://far/v1", model="m")
    model = ModelTeacherConfig(model_path=Path("m"))
    configs = {"sums": model, "prose": model, "far": far}
    places = [SequencePlace("store", row, 7, weight=0.5, compared=Compared(row)) for row in range(5)]

    async def main() -> None:
        await policy.load(places, kind="examples")
        teachers = Teachers(session, configs, {"sums": 2, "prose": 1}, top_k)
        await teachers.fill(places, ["sums", "prose", "sums", "far", "sums"], "examples")

    asyncio.run(main())
    return policy, sums, prose


@pytest.mark.parametrize("shares_devices", [True, False])
def test_each_sequence_gets_what_its_teacher_says(shares_devices: bool) -> None:
    policy, sums, prose = ask_teachers(None, shares_devices=shares_devices)
    assert [place.row for place in sums.loaded[0]] == [0, 2, 4, 0]  # filled up to a multiple of two
    assert [place.weight for place in sums.loaded[0]] == [0.5, 0.5, 0.5, 0]
    assert [place.row for place in prose.loaded[0]] == [1]
    assert policy.calls == [("teachers.far", {3}, None)]
    own, asked = "old_logprobs", "reference_logprobs"
    assert policy.taken == {
        asked: [((1, own), 0), ((2, own), 10), ((1, own), 20), ((0, asked), 30), ((1, own), 40)]
    }


def test_the_likeliest_tokens_come_with_their_logprobs() -> None:
    policy, sums, _ = ask_teachers(8, shares_devices=False)
    assert sums.calls == [8]
    assert policy.calls == [("teachers.far", {3}, 8)]
    assert policy.taken.keys() == {"top_ids", "top_logprobs"}
    assert policy.taken["top_ids"][:2] == [((1, "top_ids"), 0), ((2, "top_ids"), 10)]


class MeetingGroup(StandInGroup):
    """Computes logprobs when all others do; the policy trains on what it has taken."""

    def __init__(self, mark: float, barrier: asyncio.Barrier) -> None:
        super().__init__(mark)
        self.barrier, self.devices = barrier, self

    async def load(self, places: list[SequencePlace], **_: Any) -> None:
        self.loaded.append(places)

    async def logprobs(self, **_: bool) -> LogprobStats:
        async with asyncio.timeout(10):
            await self.barrier.wait()
        return LogprobStats(0.0, 0.0, 9)

    async def train(self, loss: Any, minibatch: int, *, keep: bool = False) -> TrainStats:
        self.calls.append(("train", self.taken["reference_logprobs"]))
        return TrainStats({"tokens": 4.0}, {}, 1.0, 0.1, False, False, 9, 9, 9)

    def packing_metrics(self) -> dict[str, float]:
        return {}


def test_teachers_score_while_the_policy_computes_its_logprobs() -> None:
    barrier = asyncio.Barrier(3)
    policy, sums, prose = (MeetingGroup(mark, barrier) for mark in range(3))
    session = Session(models=cast(Any, {"policy": policy, "teacher_sums": sums, "teacher_prose": prose}))
    model = ModelTeacherConfig(model_path=Path("m"))
    teachers = Teachers(session, {"sums": model, "prose": model}, {"sums": 1, "prose": 1}, None)
    config: Any = of_updates(1)
    update = DistillationUpdate(config, ["sums", "prose"], multiple=1)
    observer: Any = SimpleNamespace(
        stage=lambda *_, **__: nullcontext(SimpleNamespace(advance=lambda **_: None))
    )
    gate: Any = SimpleNamespace(due=lambda _: True, check=lambda *_: None)
    nobody: Any = None
    algorithm = OnlineAlgorithm(config, session, nobody, update, gate, observer, nobody, teachers=teachers)
    groups = [group(number, trajectory(1.0, row=0)) for number in range(2)]
    asyncio.run(algorithm.train(update.prepare(groups, 1), 1))
    assert policy.calls == [("train", [((1, "old_logprobs"), 0), ((2, "old_logprobs"), 0)])]


def test_where_nothing_trains_neither_policy_nor_teachers_are_asked() -> None:
    config: Any = of_updates(1)
    nobody: Any = None
    update = DistillationUpdate(config, ["sums"], multiple=1)
    algorithm = OnlineAlgorithm(config, nobody, nobody, update, nobody, nobody, nobody, teachers=nobody)
    batch = update.prepare([group(0, failed(0), failed(1))], 1)
    assert asyncio.run(algorithm.train(batch, 1)) == optimizer_metrics([], left_out=1)


def test_each_minibatch_is_weighed_and_filled_up_alone() -> None:
    """Three samples of which the middle one failed, and one more, in two updates of two ranks."""
    config: Any = of_updates(2)
    groups = [
        group(0, trajectory(1.0, row=0, sampled=3), trajectory(1.0, row=1, sampled=1)),
        group(1, failed(0), trajectory(1.0, row=1, sampled=5)),
    ]
    batch = DistillationUpdate(config, ["sums", "prose"], multiple=4).prepare(groups, 1)
    assert (batch.num_minibatches, batch.num_updates, list(batch.schedule)) == (2, 2, [0, 1])
    weights = [place.weight for place in batch.sequences]
    assert weights == pytest.approx([1 / 4, 1 / 4, 0, 0, 0, 1 / 5, 0, 0])
    assert batch.teachers == ("sums",) * 4 + ("prose",) * 4
    lost = DistillationUpdate(config, ["sums", "prose"], multiple=1)
    batch = lost.prepare([groups[0], group(1, failed(0), failed(1))], 1)
    assert (list(batch.schedule), batch.left_out) == ([0], 1)
