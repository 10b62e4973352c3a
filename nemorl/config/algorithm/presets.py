"""The named algorithms: rows that set parts of the `algorithm` section.

A preset is laid under that section as an inherited file would be: what the experiment sets wins. `PRESETS`
are the online algorithms, `PREFERENCE_PRESETS` those that learn from pairs of answers. docs/algorithms.md is
generated from these rows (`python tools/algorithms_page.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from inspect import cleandoc
from typing import Any


@dataclass(frozen=True)
class Preset:
    """One algorithm: its name in experiments, its source, and the fields of `algorithm` that it sets."""

    name: str
    title: str  # short, as the paper calls it
    paper: str  # a link
    settings: Mapping[str, Any]  # of the `algorithm` section
    description: str = ""  # Markdown: the formulas, and what differs from the paper or from other algorithms

    def __post_init__(self) -> None:
        object.__setattr__(self, "description", cleandoc(self.description))


def _by_name(*presets: Preset) -> dict[str, Preset]:
    return {preset.name: preset for preset in presets}


_KL_IN_REWARD = {"estimator": "k1", "placement": "reward"}

PRESETS = _by_name(
    Preset(
        "bi_level_gae",
        "PPO with GAE over turns and over their tokens",
        "https://arxiv.org/abs/2510.16907",
        {
            "advantage": {
                "name": "bi_level_gae",
                "gamma": 1.0,
                "lam": 1.0,
                "turn_gamma": 0.95,
                "turn_lam": 1.0,
            },
            "loss": {"name": "clip"},
            "kl": _KL_IN_REWARD,
            "critic": {"value_clip": 0.2},
        },
        """Bi-level GAE: advantages of turns, carried back to the tokens inside each turn.

        GAE over turns, with each turn's reward and a separate discount, gives the last token of a turn its
        advantage; GAE over tokens runs from there to the turn's first token. Rewards of turns are not
        diluted by the hundreds of tokens between them. Recommended: a discount over turns of 0.95 or less
        where early turns should matter less for late rewards, and 1 over tokens.
        """,
    ),
    Preset(
        "cispo",
        "Clipped importance sampling weights (MiniMax-M1)",
        "https://arxiv.org/abs/2506.13585",
        {
            "advantage": {"name": "group"},
            "loss": {"name": "cispo", "clip_high": 4.0, "aggregation": "token-mean"},
        },
        """CISPO: the ratio is a weight without gradient that is clipped; every token keeps its gradient.

            loss of a token: -sg[min(r_t, 1 + clip_high)] A log p_t, averaged over all tokens

        PPO drops the gradient of tokens whose ratio left its bounds, often rare ones at turns of a
        reasoning, such as "However". The paper tunes the upper bound, without giving its value, and has
        neither a lower one nor a divergence from a reference; 1 + clip_high is 5 here, as in ART.
        """,
    ),
    Preset(
        "clip_cov",
        "Covariance clipping against entropy collapse",
        "https://arxiv.org/abs/2505.22617",
        {
            "advantage": {"name": "group"},
            "loss": {"name": "clip_cov", "fraction": 0.0002, "covariance_low": 1.0, "covariance_high": 5.0},
        },
        """Clip-Cov: leave out a few of the tokens with the highest covariance of logprob and advantage, to
        keep the entropy up.

            cov_t = (log p_t - mean) (A_t - mean) over all tokens of an update
            of the tokens with covariance_low <= cov_t <= covariance_high at most `fraction`, drawn, have
            loss 0; the others PPO's clipped surrogate

        The change of the entropy in a step is minus the covariance of logprob and advantage, most of which
        comes from a small share of tokens. The paper uses a fraction of 2e-4 between 1 and 5: at least one
        token of an update if any lies in that range.
        """,
    ),
    Preset(
        "dapo",
        "Decoupled clip and dynamic sampling",
        "https://arxiv.org/abs/2503.14476",
        {
            "advantage": {"name": "group"},
            "loss": {"name": "clip", "clip_low": 0.2, "clip_high": 0.28, "aggregation": "token-mean"},
            "filters": {"drop_equal_rewards": True, "refill": {"max_batches": 10}},
        },
        """DAPO: GRPO for long answers, with four changes.

            clip-higher:       the ratio may rise to 1 + 0.28 and fall to 1 - 0.2: rare tokens can grow
            token mean:        every token of the batch has the same weight, in long answers too
            dynamic sampling:  groups of equal rewards are dropped, and others sampled in their place
            overlong answers:  left out of training, or punished softly near the limit

        There is no divergence from a reference. `filters.refill.max_batches` bounds dynamic sampling. If a
        penalty of length is among the rewards, set `filters.reward` to the reward that says right or wrong,
        which the paper's constraint is about. The last change is left to the experiment:
        `filters.drop_truncated`, or a reward for overlong answers. The paper makes 16 updates of a step of
        512 prompts with 16 generations.
        """,
    ),
    Preset(
        "dr_grpo",
        "GRPO done right: no bias by length or by difficulty",
        "https://arxiv.org/abs/2503.20783",
        {
            "advantage": {"name": "group", "normalize": False},
            "loss": {"name": "clip", "aggregation": "seq-mean-token-sum-norm"},
        },
        """Dr. GRPO: two divisors of GRPO are left out, because both bias the gradient.

            A = r - mean of the group
            loss: sum over the tokens of a sequence / aggregation_length, averaged over sequences

        Without the division by the standard deviation, tasks that are nearly always or nearly never solved
        do not weigh more than others; with a fixed length instead of the sequence's length, long wrong
        answers are not favored. `loss.aggregation_length` is required, usually generation.max_new_tokens; it
        scales the learning rate.
        """,
    ),
    Preset(
        "gdpo",
        "Group-decoupled normalization of several rewards",
        "https://arxiv.org/abs/2601.05242",
        {"advantage": {"name": "gdpo"}, "loss": {"name": "clip"}},
        """GDPO: several rewards, each compared within its group before they are summed.

            A' = sum over rewards k of weight_k (r_k - mean_k of the group) / (std_k of the group + epsilon)
            A = (A' - mean of A') / (std of A' + epsilon) over the trajectories of the batch

        GRPO normalizes the sum, in which different mixtures of rewards can look the same, and a reward with a
        large spread hides the others. Weights are those of `rewards` and `env`. For GRPO's way, to sum and
        then normalize, use the advantage `group`; without the last line (`advantage.whiten_batch: false`)
        rewards are normalized and then summed.
        """,
    ),
    Preset(
        "gmpo",
        "Geometric mean policy optimization",
        "https://arxiv.org/abs/2507.20673",
        {
            "advantage": {"name": "group"},
            "loss": {
                "name": "gmpo",
                "clip_low": 0.4,
                "clip_high": 0.4,
                "aggregation": "seq-mean-token-mean",
            },
        },
        """GMPO: the geometric mean of clipped token ratios instead of the arithmetic one.

            loss of a sequence: -A exp(mean of x_t), averaged over sequences
            x_t = min(log r_t, clip_high) if A > 0, else max(log r_t, -clip_low)

        A single outlier moves the geometric mean little, so the bounds can be wide: (e^-0.4, e^0.4) in the
        paper, given as logarithms here. Tokens are clipped one by one; a clipped token leaves the others
        their gradient.
        """,
    ),
    Preset(
        "gpg",
        "Group policy gradient",
        "https://arxiv.org/abs/2504.02546",
        {"advantage": {"name": "gpg"}, "loss": {"name": "reinforce", "aggregation": "token-mean"}},
        """GPG: the plain policy gradient, scaled so that groups without a signal do not shrink it.

            A = alpha (r - mean of the group), alpha = B / (B - M)
            M of the batch's B groups have equal rewards
            loss: -A log p, averaged over all tokens

        No ratio, no clipping, no reference, no standard deviation. With `filters.drop_equal_rewards` and
        `refill` there are no such groups, and alpha is 1: the paper's other way to the same end.
        """,
    ),
    Preset(
        "grpo",
        "Group relative policy optimization",
        "https://arxiv.org/abs/2402.03300",
        {"advantage": {"name": "group", "normalize": True}, "loss": {"name": "clip"}},
        """GRPO: the mean of a group is the baseline, so no critic is needed.

            A = (r - mean of the group) / (std of the group + epsilon), for all tokens of a trajectory
            loss of a token: -min(r_t A, clip(r_t, 1 - clip_low, 1 + clip_high) A), r_t = p_t / p_old,t

        The loss is PPO's clipped surrogate; with `kl.coefficient` the divergence from the reference is added
        to it. The paper averages over the tokens of a sequence and then over sequences; the default here is
        the mean over all tokens of the batch, as in DAPO and most later work.
        """,
    ),
    Preset(
        "gspo",
        "Group sequence policy optimization",
        "https://arxiv.org/abs/2507.18071",
        {
            "advantage": {"name": "group"},
            "loss": {
                "name": "gspo",
                "clip_low": 0.0003,
                "clip_high": 0.0004,
                "aggregation": "seq-mean-token-mean",
            },
        },
        """GSPO: ratio and clipping are of the sequence, as the reward is.

            s = (p(y) / p_old(y))^(1/|y|) = exp(mean of log p_t - log p_old,t)
            loss of a sequence: -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), averaged over sequences

        Ratios of single tokens are noisy, above all where experts are routed differently after each update;
        their geometric mean is not. It varies far less, hence the narrow bounds 3e-4 and 4e-4. The paper
        makes four minibatches of a step and has no divergence from a reference.
        """,
    ),
    Preset(
        "gspo_token",
        "GSPO with advantages of tokens",
        "https://arxiv.org/abs/2507.18071",
        {
            "advantage": {"name": "group"},
            "loss": {
                "name": "gspo_token",
                "clip_low": 0.0003,
                "clip_high": 0.0004,
                "aggregation": "seq-mean-token-mean",
            },
        },
        """GSPO-token: GSPO's ratio with the gradient of each token, so that tokens may differ in their
        advantages.

            s_t = sg[s] p_t / sg[p_t]
            loss of a token: -min(s_t A_t, clip(s_t, 1 - clip_low, 1 + clip_high) A_t)

        sg stops the gradient, s is GSPO's ratio of the sequence. With equal advantages in a sequence, loss
        and gradient are GSPO's.
        """,
    ),
    Preset(
        "kl_cov",
        "Covariance-held tokens against entropy collapse",
        "https://arxiv.org/abs/2505.22617",
        {
            "num_minibatches": 8,
            "advantage": {"name": "group"},
            "loss": {"name": "kl_cov", "fraction": 0.002, "coefficient": 1.0},
        },
        """KL-Cov: tokens with the highest covariance of logprob and advantage are held near the old policy.

            cov_t = (log p_t - mean) (A_t - mean) over all tokens of an update
            loss of a token: -r_t A_t, plus coefficient |log p_t - log p_old,t| for the `fraction` of
            highest cov_t

        It keeps the entropy higher than Clip-Cov in the paper, which uses fractions of 2e-3 (7B) and 2e-4
        (32B) with coefficient 1. The penalty acts from the second update of a step on, so minibatches are
        needed: 8 here.
        """,
    ),
    Preset(
        "mt_grpo",
        "GRPO with an advantage for each turn",
        "https://arxiv.org/abs/2505.11821",
        {"advantage": {"name": "turn"}, "loss": {"name": "clip"}},
        """MT-GRPO: in conversations of several turns, each turn is compared with the same turn of the others.

            A of turn k, before the last one: norm(reward of turn k) + outcome_weight norm(outcome)
            A of the last turn:               norm(outcome)
            norm(x) = (x - mean) / (std + epsilon) over the group; the outcome is the sum of all other rewards

        So a useful tool call is not blamed for a wrong answer, nor a useless one credited for a right one. It
        requires an environment that rewards turns, such as `calculator` with `call_weight`, or
        `chained_sums`. With `advantage.discount` the rewards of later turns count for a turn too.
        """,
    ),
    Preset(
        "opo",
        "On-policy RL with the optimal baseline",
        "https://arxiv.org/abs/2505.23585",
        {"advantage": {"name": "opo"}, "loss": {"name": "reinforce", "aggregation": "seq-mean-token-sum"}},
        """OPO: of all baselines of a group, the one whose gradient has the least variance.

            b = sum of l_i r_i / sum of l_i, with l the sampled tokens of a trajectory
            A = r - b
            loss of a sequence: -A log p(y), the sum over its tokens, averaged over sequences

        It follows if the gradient's square norm grows with the length of an answer. Exactly on-policy: one
        update per batch, no clipping, no divergence, no entropy bonus, no standard deviation.
        """,
    ),
    Preset(
        "pass_at_k",
        "Training on pass@k",
        "https://arxiv.org/abs/2508.10751",
        {"advantage": {"name": "pass_at_k", "k": 4}, "loss": {"name": "clip"}},
        """Pass@k training: a trajectory's advantage is what it adds to the chance that one of k passes.

            R = 1 - C(n-, k) / C(n, k), s = sqrt(R (1 - R)), n- of the group's n trajectories do not pass
            A of one that passes: (1 - R) / s
            A of one that does not: (1 - R - C(n- - 1, k - 1) / C(n - 1, k - 1)) / s

        This is the mean of GRPO's advantage over all sets of k, each with reward 1 if any of it passes.
        Groups that mostly fail have the largest advantages, so the policy keeps trying different ways. A
        trajectory passes at `advantage.pass_reward`; k must be less than the group.
        """,
    ),
    Preset(
        "ppo",
        "Proximal policy optimization with a critic",
        "https://arxiv.org/abs/1707.06347",
        {
            "advantage": {"name": "gae", "gamma": 1.0, "lam": 0.95},
            "loss": {"name": "clip", "clip_low": 0.2, "clip_high": 0.2},
            "kl": _KL_IN_REWARD,
            "critic": {"value_clip": 0.2},
        },
        """PPO: a critic estimates the return at every token, so that every token has its advantage.

        `A[t] = delta[t] + gamma lambda A[t + 1]` with `delta[t] = r[t] + gamma V[t + 1] - V[t]`, whitened
        over the batch; the policy learns with the clipped surrogate, the critic the returns `A + V` with
        clipped values. With `kl.coefficient` the divergence from the reference is subtracted from each
        token's reward (k1), as in InstructGPT. Usual: a learning rate of the critic several times the
        policy's, two to four minibatches, one epoch.
        """,
    ),
    Preset(
        "reinforce",
        "REINFORCE with the batch as the baseline",
        "https://doi.org/10.1007/BF00992696",
        {
            "advantage": {"name": "reinforce", "normalization": "mean"},
            "loss": {"name": "reinforce", "aggregation": "seq-mean-token-sum"},
        },
        """REINFORCE: the logprob of each trajectory, weighted by its reward relative to the batch.

            A = r - mean of r over the batch
            loss of a sequence: -A log p(y), the sum over its tokens, averaged over sequences

        Williams 1992, "Simple statistical gradient-following algorithms for connectionist reinforcement
        learning". It needs no groups: `num_generations_per_prompt` may be 1. Tasks that differ in difficulty
        make its variance large; `advantage.normalization: whiten` also divides by the standard deviation of
        the batch.
        """,
    ),
    Preset(
        "reinforce_plus_plus",
        "REINFORCE with returns of tokens, whitened over the batch",
        "https://arxiv.org/abs/2501.03262",
        {
            "advantage": {"name": "token_returns", "gamma": 1.0, "whiten": True},
            "loss": {"name": "clip"},
            "kl": _KL_IN_REWARD,
        },
        """REINFORCE++: no critic and no groups; the batch scales the advantages.

        The advantage of a token is the sum of the rewards from it on, less the divergence of these tokens
        from the reference (k1, in the reward), with mean 0 and variance 1 over the sampled tokens of the
        batch. The loss is PPO's clipped surrogate. The paper's baseline form subtracts the mean of a group
        first: `reinforce_plus_plus_baseline`.
        """,
    ),
    Preset(
        "reinforce_plus_plus_baseline",
        "REINFORCE++ with the mean of a group as the baseline",
        "https://arxiv.org/abs/2501.03262",
        {"advantage": {"name": "group_then_batch", "over": "tokens"}, "loss": {"name": "clip"}},
        """REINFORCE++-baseline: the group is the baseline, the batch the scale.

            A' = r - mean of the group
            A = (A' - mean of A') / (std of A' + epsilon), mean and std over all sampled tokens of the batch

        GRPO divides by the deviation of single groups, which is noisy where groups are small and weighs
        their tasks by it; that of the batch is the same for all. The loss is PPO's clipped surrogate. The
        paper adds a divergence in the loss: `kl: {coefficient: 0.001, estimator: k2}`.
        """,
    ),
    Preset(
        "remax",
        "REINFORCE, a greedy answer as the baseline",
        "https://arxiv.org/abs/2310.10505",
        {
            "advantage": {"name": "remax"},
            "loss": {"name": "reinforce", "aggregation": "seq-mean-token-sum"},
        },
        """ReMax: the reward of the policy's most likely answer is the baseline.

            A = r - r of a greedy sample of the same task
            loss of a sequence: -A log p(y), the sum over its tokens, averaged over sequences

        One more sample of each task is drawn at temperature 0; it is scored but not trained on, and its mean
        reward is the metric `reward/of_greedy`. The paper uses `num_generations_per_prompt: 1`.
        """,
    ),
    Preset(
        "rloo",
        "REINFORCE, the others of the group as the baseline",
        "https://arxiv.org/abs/2402.14740",
        {
            "advantage": {"name": "group", "normalize": False, "leave_one_out": True},
            "loss": {"name": "reinforce", "aggregation": "seq-mean-token-sum"},
        },
        """RLOO: the baseline of a trajectory is the mean reward of the others, so the gradient is unbiased.

            A_i = r_i - mean of r_j over j != i
            loss of a sequence: -A log p(y), the sum over its tokens, averaged over sequences

        An answer is one action, so there is no ratio and nothing is clipped. The paper uses two or four
        generations of a prompt, and subtracts the divergence from the reference from the reward.
        """,
    ),
    Preset(
        "sapo",
        "Soft adaptive policy optimization",
        "https://arxiv.org/abs/2511.20347",
        {
            "advantage": {"name": "group"},
            "loss": {
                "name": "sapo",
                "temperature_positive": 1.0,
                "temperature_negative": 1.05,
                "aggregation": "seq-mean-token-mean",
            },
        },
        """SAPO: a sigmoid gate replaces clipping, so the gradient fades instead of stopping.

            loss of a token: -(4 / t) sigmoid(t (r_t - 1)) A, averaged over tokens and then over sequences

        with the temperature t of the advantage's sign. It is larger for negative advantages, 1.05 instead of
        1.0: these raise all tokens that were not sampled, which makes training unstable.
        """,
    ),
    Preset(
        "starpo_s",
        "Agents on the most uncertain tasks",
        "https://arxiv.org/abs/2504.20073",
        {
            "advantage": {"name": "group"},
            "loss": {"name": "clip", "clip_low": 0.2, "clip_high": 0.28},
            "filters": {"keep_most_varied": 0.25},
        },
        """StarPO-S (RAGEN): for conversations of several turns, train only on the groups whose rewards vary
        most.

            U(task) = standard deviation of the rewards of its group
            the `filters.keep_most_varied` of a batch's groups with the largest U train

        Tasks that always fail or always succeed add noise that lets agents collapse into one way of
        answering. As here, the paper raises the upper clip bound and has no divergence from a reference. For
        the same with PPO, use the advantage `gae` or `bi_level_gae` and a critic.
        """,
    ),
    Preset(
        "turn_gae",
        "PPO over turns",
        "https://arxiv.org/abs/1506.02438",
        {
            "advantage": {"name": "turn_gae", "gamma": 1.0, "lam": 0.95},
            "loss": {"name": "clip"},
            "kl": _KL_IN_REWARD,
            "critic": {"value_clip": 0.2},
        },
        """Turn-level PPO: a turn is one action of the policy, with one advantage for all its tokens.

        GAE over turns: the value of a turn is that of the state in which its first token is chosen. For
        environments of many turns that reward each of them, where credit belongs to actions and not to single
        words.
        """,
    ),
    Preset(
        "vapo",
        "Value-based augmented PPO",
        "https://arxiv.org/abs/2504.05118",
        {
            "advantage": {"name": "gae", "gamma": 1.0, "length_adaptive_alpha": 0.05, "critic_lam": 1.0},
            "loss": {"name": "clip", "clip_low": 0.2, "clip_high": 0.28, "aggregation": "token-mean"},
            "likelihood": {"coefficient": 0.1},
            "critic": {"value_clip": 0.2, "warmup_steps": 50},
        },
        """VAPO: PPO for long chains of thought.

        The critic learns the observed returns (lambda 1), which carries the reward back over thousands of
        tokens; the policy's lambda grows with the length l of a trajectory, `1 - 1 / (alpha l)`. The critic
        learns alone before the policy does (value pre-training: `critic.warmup_steps` with lambda 1). The
        upper bound of the clip is higher, and every token has the same weight. The mean negative logprob of
        the tokens of right answers is added to the loss with weight 0.1; `likelihood.min_reward` defines
        right. The paper uses 50 steps of pre-training, groups of 16, and learning rates of 1e-6 for the
        policy and 2e-6 for the critic.
        """,
    ),
)

PREFERENCE_PRESETS = _by_name(
    Preset(
        "dpo",
        "Direct preference optimization",
        "https://arxiv.org/abs/2305.18290",
        {"loss": {"name": "logistic"}},
    ),
    Preset(
        "cdpo",
        "Conservative DPO: labels may be wrong",
        "https://ericmitchell.ai/cdpo.pdf",
        {"loss": {"name": "logistic", "label_smoothing": 0.1}},
    ),
    Preset(
        "robust_dpo",
        "DPO, unbiased under wrong labels",
        "https://arxiv.org/abs/2403.00409",
        {"loss": {"name": "robust", "label_smoothing": 0.1}},
    ),
    Preset(
        "ipo",
        "Identity preference optimization",
        "https://arxiv.org/abs/2310.12036",
        {"loss": {"name": "squared"}},
    ),
    Preset(
        "hinge",
        "Hinge loss relative to a reference (RSO)",
        "https://arxiv.org/abs/2309.06657",
        {"loss": {"name": "hinge"}},
    ),
    Preset(
        "slic",
        "Sequence likelihood calibration",
        "https://arxiv.org/abs/2305.10425",
        {"loss": {"name": "hinge", "reference": False, "beta": 1.0}, "sft_coefficient": 0.1},
    ),
    Preset(
        "simpo",
        "Simple preference optimization: means, no reference",
        "https://arxiv.org/abs/2405.14734",
        {
            "loss": {
                "name": "logistic",
                "reference": False,
                "logprobs": "mean",
                "beta": 2.0,
                "gamma": 1.0,
            }
        },
    ),
    Preset(
        "cpo",
        "Contrastive preference optimization",
        "https://arxiv.org/abs/2401.08417",
        {"loss": {"name": "logistic", "reference": False}, "sft_coefficient": 1.0},
    ),
    Preset(
        "orpo",
        "Odds ratio preference optimization",
        "https://arxiv.org/abs/2403.07691",
        {"loss": {"name": "odds_ratio"}, "sft_coefficient": 1.0},
    ),
    Preset(
        "apo_zero",
        "Anchored: chosen answers are better than the policy's",
        "https://arxiv.org/abs/2408.06266",
        {"loss": {"name": "anchored", "anchor": "zero"}},
    ),
    Preset(
        "apo_down",
        "Anchored: chosen answers are worse than the policy's",
        "https://arxiv.org/abs/2408.06266",
        {"loss": {"name": "anchored", "anchor": "down"}},
    ),
)
