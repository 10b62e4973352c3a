"""Policy losses of one's own: found by their path, tried on a tiny batch, and learned with."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from nemorl.algorithms.custom import CustomFunctionError, policy_loss, smoke_test_loss
from nemorl.algorithms.objective import TokenLoss, log_ratio
from nemorl.algorithms.policy_losses import PolicyLoss
from nemorl.config.algorithm.losses import ClipLossConfig, CustomLossConfig
from nemorl.data.packed import PackedBatch
from tests.algorithms.packed import current, ragged

PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"
HERE = "tests.algorithms.test_own_loss"


@policy_loss
def unclipped(
    batch: PackedBatch, logprobs: Tensor, old: Tensor, advantages: Tensor, *, scale: float = 1.0
) -> TokenLoss:
    """The ratio times the advantage."""
    ratio = log_ratio(batch, logprobs, old).exp()
    return TokenLoss(-scale * ratio * advantages, ratio, {"own/large": ratio > 1.1})


def plain_tensor(batch: PackedBatch, logprobs: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    return -logprobs * advantages


def summed(batch: PackedBatch, logprobs: Tensor, old: Tensor, advantages: Tensor) -> TokenLoss:
    return TokenLoss((-logprobs * advantages).sum())


def detached(batch: PackedBatch, logprobs: Tensor, old: Tensor, advantages: Tensor) -> TokenLoss:
    return TokenLoss(-logprobs.detach() * advantages)


def flat(batch: PackedBatch, logprobs: Tensor, old: Tensor, advantages: Tensor) -> TokenLoss:
    return TokenLoss(0 * logprobs * advantages)


def infinite(batch: PackedBatch, logprobs: Tensor, old: Tensor, advantages: Tensor) -> TokenLoss:
    return TokenLoss(logprobs / (advantages - advantages))


def padded(batch: PackedBatch, logprobs: Tensor, old: Tensor, advantages: Tensor) -> TokenLoss:
    return TokenLoss(-logprobs[:, 0] * advantages)


def worded(batch: PackedBatch, logprobs: Tensor, old: Tensor, advantages: Tensor) -> TokenLoss:
    return TokenLoss(-logprobs * advantages, metrics={"own/share": 0.5})  # type: ignore[dict-item]


def ending(batch: PackedBatch, logprobs: Tensor, old: Tensor, advantages: Tensor) -> TokenLoss:
    raise SystemExit("I have seen enough")


def short(batch: PackedBatch, logprobs: Tensor, old: Tensor, advantages: Tensor) -> TokenLoss:
    """Sound on the tiny batch alone."""
    return TokenLoss((-logprobs * advantages)[:5])


def three(batch: PackedBatch, logprobs: Tensor, advantages: Tensor) -> TokenLoss:
    return TokenLoss(-logprobs * advantages)


def own(name: str, **arguments: Any) -> CustomLossConfig:
    return CustomLossConfig(name="custom", function=f"{HERE}:{name}", arguments=arguments)


def test_a_sound_loss_is_taken() -> None:
    smoke_test_loss(own("unclipped", scale=2.0))


def test_the_example_of_the_page_is_sound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = PAGE.read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(# my_losses\.py\n.*?)```", page, re.DOTALL)
    (section,) = re.findall(r"`loss: (\{.*?\}\})`", page)
    (tmp_path / "my_losses.py").write_text(example, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    smoke_test_loss(CustomLossConfig.model_validate(yaml.safe_load(section)))


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (own("gone"), "has no gone; correct the name"),
        (
            CustomLossConfig(name="custom", function="no.such:thing"),
            r"cannot import no\.such: ModuleNotFoundError",
        ),
        (own("unclipped", scales=2.0), "unexpected keyword argument 'scales'"),
        (own("three"), "too many positional arguments"),
        (own("plain_tensor"), "it returned Tensor: return a TokenLoss"),
        (own("summed"), r"its loss has the shape \[\] instead of \[5\]"),
        (own("worded"), "its metric own/share is of the type float"),
        (own("detached"), "no gradient reaches the logprobs"),
        (own("flat"), "its gradient is 0 at every sampled token"),
        (own("infinite"), "its loss is not finite"),
        (own("ending"), r"on a tiny batch of packed tensors \[N\] it raised SystemExit: I have seen enough"),
        (own("padded"), r"on a tiny batch of packed tensors \[N\] it raised IndexError"),
    ],
    ids=lambda value: value.function.partition(":")[2] if isinstance(value, CustomLossConfig) else "",
)
def test_what_cannot_be_learned_with_is_refused(config: CustomLossConfig, problem: str) -> None:
    with pytest.raises(CustomFunctionError, match=problem) as refused:
        smoke_test_loss(config)
    assert config.function in str(refused.value)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("short", r"the shape \[5\] instead of \[\d+\]"),
        ("ending", "it raised SystemExit: I have seen enough"),
    ],
)
def test_what_goes_wrong_in_training_only_names_the_function(name: str, problem: str) -> None:
    batch = ragged(0)
    assert batch.num_tokens > 5
    if name == "short":
        smoke_test_loss(own(name))
    with pytest.raises(
        CustomFunctionError, match=rf"`{HERE}:{name}`: .*{problem}.*\(algorithm.loss.function\)"
    ):
        PolicyLoss(own(name))(batch, current(batch, 0), torch.rand(batch.num_tokens))


def test_the_mark_checks_the_signature_where_it_is_defined() -> None:
    with pytest.raises(CustomFunctionError, match="`three`: it takes 3 positional arguments"):
        policy_loss(three)


def test_it_is_learned_with_as_any_other() -> None:
    batch = ragged(0)
    logprobs = current(batch, 0).requires_grad_()
    wide = ClipLossConfig(clip_low=0.99, clip_high=99)
    entropy = torch.rand(batch.num_tokens)
    output = PolicyLoss(own("unclipped"))(batch, logprobs, entropy)
    torch.testing.assert_close(output.loss, PolicyLoss(wide)(batch, logprobs, entropy).loss)
    large = (logprobs - batch.old_logprobs)[batch.loss_mask].exp() > 1.1  # type: ignore[operator]
    assert int(output.sums["own/large"]) == int(large.sum()) > 0
