"""Advantages of single tokens, over a batch as it lies on a data-parallel rank.

Only sampled tokens are states: the token after the last one of a turn is the first one of the next. The state
in which a token is chosen has the value that the critic gives after the token before it. After the last
sampled token nothing is expected, also where a trajectory was cut off at its length. Everything is computed
in float64, [S, L] for S sequences of at most L sampled tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemorl.config.algorithm import CorrectionConfig, KLConfig, NoCorrectionConfig
from nemorl.config.algorithm import advantages as configs
from nemorl.data.losses import TokenEstimate
from nemorl.data.packed import PackedBatch

from .objective import kept, kl_penalty, totals, weights_before

SumOverRanks = Callable[[Tensor], Tensor]

WHITENING_EPSILON = 1e-8  # added to the variance, so that equal advantages become 0
MIN_ENERGY = 1e-8  # added to the sum of energies that divides a baseline (verl)


class SampledTokens:
    """The M sampled tokens of a batch, a row for each sequence, in their order and without gaps."""

    def __init__(self, batch: PackedBatch) -> None:
        self.batch = batch
        self.places = batch.loss_mask.nonzero().squeeze(1)  # [M] in the batch
        sequences = torch.arange(batch.num_sequences).repeat_interleave(torch.tensor(batch.lengths))
        self._rows = sequences[self.places]
        self.lengths = torch.bincount(self._rows, minlength=batch.num_sequences)  # [S]
        firsts = self.lengths.cumsum(0) - self.lengths
        self._columns = torch.arange(len(self.places)) - firsts[self._rows]

    @property
    def turns(self) -> Tensor:  # [S, L] number of the turn in its sequence
        assert self.batch.turns is not None, "advantages of turns require `turns`"
        return self.table(self.batch.turns).long()

    def table(self, values: Tensor) -> Tensor:
        """[S, L] float64 of values [N] of the batch; 0 beyond the end of a row."""
        longest = max(1, int(self.lengths.max()))
        table = torch.zeros(self.batch.num_sequences, longest, dtype=torch.float64)
        table[self._rows, self._columns] = values[self.places].double()
        return table

    def spread(self, table: Tensor) -> Tensor:
        """[N] float32 of a table [S, L]; 0 at tokens that were not sampled."""
        values = torch.zeros(self.batch.num_tokens)
        values[self.places] = table[self._rows, self._columns].float()
        return values


def discounted_sums(terms: Tensor, factor: Tensor | float) -> Tensor:
    """[S, L] with `sums[t] = terms[t] + factor[t] * sums[t + 1]`; `factor` broadcasts to [S, L]."""
    factors = torch.as_tensor(factor, dtype=terms.dtype).expand_as(terms)
    sums = torch.empty_like(terms)
    later = torch.zeros(len(terms), dtype=terms.dtype)
    for t in reversed(range(terms.shape[1])):
        later = terms[:, t] + factors[:, t] * later
        sums[:, t] = later
    return sums


def gae(rewards: Tensor, values: Tensor, gamma: float, lam: Tensor | float) -> Tensor:
    """Generalized advantages [S, L] (Schulman et al. 2015, arXiv 1506.02438).

    `A[t] = delta[t] + gamma lam A[t + 1]` with `delta[t] = r[t] + gamma V[t + 1] - V[t]`, where `V[t]` is the
    value of the state in which t is chosen, and 0 after the end. `lam` is a number, or one a sequence [S, 1].
    """
    return discounted_sums(rewards + gamma * _next(values) - values, gamma * lam)


def length_adaptive_lambda(lengths: Tensor, alpha: float) -> Tensor:
    """[S, 1] `1 - 1 / (alpha l)` for l sampled tokens (VAPO, arXiv 2504.05118), at least 0."""
    return (1 - 1 / (alpha * lengths.clamp(min=1).double())).clamp(min=0).unsqueeze(1)


def turn_gae(
    rewards: Tensor, values: Tensor, turns: Tensor, is_sampled: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Advantages and returns [S, L] where a turn is one action.

    GAE over turns, with the value of the state in which a turn's first token is chosen. All tokens of a turn
    have its advantage and, as there is no discount inside it, its return, which the critic learns for each.
    """
    first, _ = _turn_borders(turns, is_sampled)
    turn_rewards = _over_turns(rewards * is_sampled, turns)
    state = _over_turns(values * first, turns)
    advantages = gae(turn_rewards, state, gamma, lam)
    return advantages.gather(1, turns), (advantages + state).gather(1, turns)


def bi_level_gae(
    rewards: Tensor,
    penalties: Tensor,
    values: Tensor,
    turns: Tensor,
    is_sampled: Tensor,
    config: configs.BiLevelGaeConfig,
) -> Tensor:
    """Advantages [S, L] of turns, and inside each turn of its tokens (VAGEN, arXiv 2510.16907).

    GAE over turns, with the value of the state in which a turn's last token is chosen, gives that token its
    advantage; from there GAE runs back to the turn's first token. `penalties` are taken from single tokens
    and do not count among the rewards of a turn.
    """
    _, last = _turn_borders(turns, is_sampled)
    turn_rewards = _over_turns(rewards * is_sampled, turns)
    state = _over_turns(values * last, turns)
    of_turns = gae(turn_rewards, state, config.turn_gamma, config.turn_lam).gather(1, turns)
    inside = config.gamma * _next(values) - values
    deltas = torch.where(last, of_turns, inside) - penalties
    return discounted_sums(deltas * is_sampled, config.gamma * config.lam * ~last)


def energies(batch: PackedBatch) -> Tensor:
    """[N] float64: the squared norm of the gradient of each token's logprob with respect to the logits.

    `|1[y] - p|^2 = (1 - p_y)^2 + sum of p_j^2 over j != y` (verl: `1 - 2 p_y + sum of p^2`).
    """
    assert batch.old_logprobs is not None, "energies require the policy's logprobs"
    assert batch.old_collisions is not None, "energies require sums of squared probabilities"
    chances = batch.old_logprobs.double().exp()
    others = batch.old_collisions.double() - chances.square()  # rounded; so small energies stay positive
    return (1 - chances).square() + others.clamp(min=0)


def optimal_baselines(
    returns: Tensor,
    weights: Tensor,
    compared: Tensor,
    places: Tensor,
    num_places: int,
    sum_over_ranks: SumOverRanks,
) -> Tensor:
    """[S, L] the baseline `B = sum(W G) / (sum(W) + 1e-8)` of each token, over the same tokens of its group.

    OTB (arXiv 2602.07078), of returns G and weights W [S, L], where a token is `compared` [S, L]; `places`
    [S, L] numbers the tokens of each group, up to `num_places` over all groups. Beyond the second longest
    sequence of a group there is nothing to compare, and the baseline is 0, as in verl.
    """
    terms = torch.stack((weights * returns, weights, torch.ones_like(weights)), dim=-1)
    sums = torch.zeros(num_places, 3, dtype=torch.float64)
    sums.index_add_(0, places[compared], terms[compared])
    weighted, total, count = sum_over_ranks(sums)[places].unbind(-1)
    return torch.where(compared & (count > 1), weighted / (total + MIN_ENERGY), 0.0)


def whiten(
    advantages: Tensor,
    mask: Tensor,
    sum_over_ranks: SumOverRanks,
    variance: configs.Variance = "unbiased",
) -> Tensor:
    """[N] with mean 0 and variance 1 over the tokens of the mask on all data-parallel ranks; 0 elsewhere.

    `(A - mean) / sqrt(var + 1e-8)`. Each sampled token counts once, whatever its
    weight in the loss.
    """
    sums = sum_over_ranks(torch.stack((mask.sum().double(), advantages[mask].double().sum())))
    count, total = sums.tolist()
    if count < 2:
        return torch.zeros_like(advantages)
    mean = total / count
    squares = sum_over_ranks((advantages[mask].double() - mean).square().sum())
    deviation = torch.sqrt(squares / (count - (variance == "unbiased")) + WHITENING_EPSILON)
    return (torch.div(advantages.double() - mean, deviation) * mask).float()


def kl_of_tokens(batch: PackedBatch, kl: KLConfig) -> Tensor:
    """[N] estimated divergence of the policy that begins the step from the reference; 0 where not sampled."""
    assert batch.old_logprobs is not None, "a divergence requires the policy's logprobs"
    assert batch.reference_logprobs is not None, "a divergence requires the reference's logprobs"
    return kl_penalty(batch.old_logprobs, batch.reference_logprobs, kl) * batch.loss_mask


@dataclass(frozen=True)
class SequenceKL:
    """The divergence of each sequence, the sum over its sampled tokens: [S]."""

    kl: KLConfig

    def __call__(self, batch: PackedBatch) -> Tensor:
        return totals(kl_of_tokens(batch, self.kl).double(), batch)


@dataclass(frozen=True)
class TokenEstimator:
    """The estimator that a config names; see `nemorl.data.losses.TokenEstimator`."""

    config: configs.TokenAdvantageBase
    kl: KLConfig | None  # where it is taken from the rewards
    correction: CorrectionConfig = NoCorrectionConfig()
    longest: Sequence[int] = ()  # of each group that is compared: sampled tokens of a sequence, at most

    def __call__(self, batch: PackedBatch, sum_over_ranks: SumOverRanks) -> TokenEstimate:
        """Needs `rewards`, and what the config requires: `values`, `turns`, `groups`, of the old policy
        `old_logprobs` and `old_collisions`, and `reference_logprobs`.
        """
        assert batch.rewards is not None, "advantages of tokens require rewards by token"
        tokens = SampledTokens(batch)
        penalties = torch.zeros(batch.num_tokens)
        if self.kl is not None:
            penalties = self.kl.coefficient * kl_of_tokens(batch, self.kl)
        terms = tokens.table(batch.rewards), tokens.table(penalties)
        table, returns = self._estimate(tokens, *terms, sum_over_ranks)
        advantages = tokens.spread(table)

        # Metrics of the advantages before they are whitened, and of the penalty of a trajectory.
        x = advantages[tokens.places].double()
        sums = [torch.tensor(len(x)).double(), x.sum(), x.square().sum()]
        sums += [penalties.double().sum(), (tokens.lengths > 0).sum().double()]
        count, total, squares, taken, sequences = sum_over_ranks(torch.stack(sums)).tolist()
        mean = total / max(count, 1)
        metrics = {
            "advantage/mean": mean,
            "advantage/std": max(squares / max(count, 1) - mean**2, 0.0) ** 0.5,
            "kl/penalty": taken / max(sequences, 1),
        }
        if isinstance(self.config, configs.WhitenedAdvantageBase) and self.config.whiten:
            advantages = whiten(advantages, batch.loss_mask, sum_over_ranks, self.config.variance)
        return TokenEstimate(advantages, None if returns is None else tokens.spread(returns), metrics)

    def _baselines(self, tokens: SampledTokens, returns: Tensor, sum_over_ranks: SumOverRanks) -> Tensor:
        """[S, L] of OTB, whose weights are sums of energies from the first sampled token on.

        A weight of the correction scales the gradient, so its square the energy. What the correction takes
        out of the loss (`divisor: kept`) is not compared.
        """
        batch = tokens.batch
        assert batch.groups is not None, "this baseline requires the groups of sequences"
        weights = tokens.table(energies(batch) * weights_before(batch, self.correction).square()).cumsum(1)
        compared = batch.loss_mask
        if self.correction.divisor == "kept":
            compared = kept(batch, self.correction)
        is_compared = tokens.table(compared).bool()
        sizes = torch.tensor(self.longest)
        first = (sizes.cumsum(0) - sizes)[tokens.table(batch.groups).long()]
        places = torch.where(is_compared, first + torch.arange(returns.shape[1]), 0)
        return optimal_baselines(returns, weights, is_compared, places, int(sizes.sum()), sum_over_ranks)

    def _estimate(
        self, tokens: SampledTokens, rewards: Tensor, penalties: Tensor, sum_over_ranks: SumOverRanks
    ) -> tuple[Tensor, Tensor | None]:  # advantages, and what the critic learns, both [S, L]
        config = self.config
        if isinstance(config, configs.TokenReturnsConfig):
            return discounted_sums(rewards - penalties, config.gamma), None
        if isinstance(config, configs.OptimalTokenBaselineConfig):
            to_come = discounted_sums(rewards - penalties, 1.0)
            return to_come - self._baselines(tokens, to_come, sum_over_ranks), None
        assert tokens.batch.values is not None, "these advantages require a critic's values"
        # Of the state in which each token is chosen; no sequence begins with a sampled token.
        values = tokens.table(tokens.batch.values.roll(1))
        is_sampled = tokens.table(tokens.batch.loss_mask).bool()
        if isinstance(config, configs.TurnGaeConfig):
            return turn_gae(rewards - penalties, values, tokens.turns, is_sampled, config.gamma, config.lam)
        if isinstance(config, configs.BiLevelGaeConfig):
            advantages = bi_level_gae(rewards, penalties, values, tokens.turns, is_sampled, config)
            return advantages, advantages + values
        assert isinstance(config, configs.GaeConfig), f"`{config}` estimates no advantages of tokens"
        alpha = config.length_adaptive_alpha
        lam = config.lam if alpha is None else length_adaptive_lambda(tokens.lengths, alpha)
        advantages = gae(rewards - penalties, values, config.gamma, lam)
        if config.critic_lam is None:
            return advantages, advantages + values
        return advantages, gae(rewards - penalties, values, config.gamma, config.critic_lam) + values


def _next(values: Tensor) -> Tensor:
    """[S, L] the value one column later; 0 after the last."""
    return torch.nn.functional.pad(values[:, 1:], (0, 1))


def _turn_borders(turns: Tensor, is_sampled: Tensor) -> tuple[Tensor, Tensor]:
    """[S, L] whether a token is its turn's first, and its turn's last."""
    changes = (turns[:, 1:] != turns[:, :-1]) | (is_sampled[:, 1:] != is_sampled[:, :-1])
    first = torch.nn.functional.pad(changes, (1, 0), value=True) & is_sampled
    last = torch.nn.functional.pad(changes, (0, 1), value=True) & is_sampled
    return first, last


def _over_turns(values: Tensor, turns: Tensor) -> Tensor:
    """[S, K] sums over the tokens of each turn, for at most K turns of a sequence."""
    sums = torch.zeros(len(values), int(turns.max()) + 1, dtype=values.dtype)
    return sums.scatter_add(1, turns, values)
