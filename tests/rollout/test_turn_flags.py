"""Turns flagged by what they say: the texts, the three shapes of environments, files and metrics."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nemorl.algorithms.metrics import rollout_metrics
from nemorl.config.environment import TurnFlagConfig
from nemorl.data.tokenizer import ChatPrompts
from nemorl.data.tool_calls import Hermes
from nemorl.generation.types import SamplingParams
from nemorl.rollout.groups import GroupSummary, summarize
from nemorl.rollout.stored import RolloutFiles, SampledBy, StoredGroup, spread
from nemorl.rollout.turn_loop import SampleKey, Sampler, TurnLimits, TurnLoop
from nemorl.trajectories import Message, Reply, Step, Task
from tests.algorithms.local_session import start_host
from tests.data.tokenizers import IM_END, save_tokenizer
from tests.rollout.stand_ins import ScriptedEnvironment, ScriptedGenerator
from tests.rollout.test_episodes import TOOLS_TEMPLATE, experiment, sample, scripted, updated

CALL, THINKING = "invalid_tool_call", "malformed_thinking"
SECTION: dict[str, Any] = {
    CALL: {"texts": ["<tool_call>", "</tool_call>"]},
    THINKING: {"texts": ["<think>", "</think>"], "max_in_reasoning": 1},
}
FLAGS = {name: TurnFlagConfig.model_validate(section) for name, section in SECTION.items()}
READ = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'


def flags_of(reply: Reply) -> tuple[str, ...]:
    sampler: Any = Sampler(None, None, None, None, flags=FLAGS)  # type: ignore[arg-type]
    return sampler.flags_of(reply)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("", ()),
        ("4", ()),
        ("<think>2 and 2</think>4", ()),
        ("<think>2 and 2</think>4</think>", (THINKING,)),
        ("4 <think>since", (THINKING,)),
        ("4 <think> </tool_call>", (CALL, THINKING)),
        # With content the reasoning does not count.
        ("<think>a <think> <think> <tool_call> b</think>4", ()),
        # In reasoning alone a tag may be once, and a call not at all.
        ("<think>a <think> b", ()),
        ("<think>a <think> <think> b", (THINKING,)),
        ("<think>a <think> <think> b</think>\n\n", (THINKING,)),
        ("<think>a <tool_call> b", (CALL,)),
        # A call that is read is not text, and one that is not read is.
        (READ, ()),
        (f"<think>a</think> 4 </think>{READ}", ()),
        ('<tool_call>{"name": "add"', (CALL,)),
    ],
)
def test_turns_are_flagged_by_content_or_by_reasoning_alone(text: str, flags: tuple[str, ...]) -> None:
    """By what the format of the model's family leaves as content and as reasoning."""
    assert flags_of(Hermes().parse(text)) == flags


def test_plain_text_is_content() -> None:
    assert flags_of(Reply("<think>2 and 2</think>4")) == (THINKING,)


def test_turns_of_a_conversation_are_flagged(tokenizer: Any) -> None:
    said = ["<tool_call> 12", "1</think>", "3"]
    generator = ScriptedGenerator([[*tokenizer.encode(text), IM_END] for text in said])
    limits = TurnLimits(1000, 100, tokenizer.end_token_ids, (), 10.0, 5.0)
    sampler = Sampler(generator, tokenizer, ChatPrompts(tokenizer), limits, flags=FLAGS)
    more = Step((Message("user", "go on"),), done=False)
    environment = ScriptedEnvironment([more, more, Step()])
    task, key = Task(0, (Message("user", "add"),)), SampleKey(1, 0, 0)
    (conversation,) = asyncio.run(TurnLoop(sampler).run(task, environment, key, SamplingParams()))
    assert [turn.flags for turn in conversation.trajectory.turns] == [(CALL,), (THINKING,), ()]


@pytest.mark.parametrize("shape", ["StepDriven", "EpisodeDriven", "OverHttp"])
def test_flags_of_all_shapes_are_in_summaries_and_metrics(shape: str, folder: Path, tokenizer: Any) -> None:
    config = experiment(folder, shape, {}, turn_flags=SECTION)
    engine = scripted(tokenizer, "<tool_call>{", "2", "<think> <think> 12 <think>")
    group, (trajectory,) = sample(config, engine.generate)
    assert [turn.flags for turn in trajectory.turns] == [(CALL,), (), (THINKING,)]
    (summary,) = group.trajectories
    assert summary.turn_flags == ((CALL,), (), (THINKING,))
    metrics = rollout_metrics([group], 0)
    assert metrics[f"flagged_turns/{CALL}"] == pytest.approx(1 / 3)
    assert metrics[f"flagged_turns/{THINKING}"] == pytest.approx(1 / 3)
    assert {name for name in metrics if name.startswith("flagged")} <= set(config.env.metrics)


def test_turns_without_flags_have_a_share_of_none(folder: Path, tokenizer: Any) -> None:
    config = experiment(folder, "StepDriven", {}, turn_flags=SECTION)
    group, _ = sample(config, scripted(tokenizer, "1", "2", "3").generate)
    assert group.trajectories[0].turn_flags == ()
    assert rollout_metrics([group], 0)[f"flagged_turns/{CALL}"] == 0.0


def test_branches_have_the_flags_of_their_turns(folder: Path, tokenizer: Any) -> None:
    """As `Delegates` makes them: the turns of the main agent are in the last two of four sequences."""
    config = experiment(folder, "Delegates", {}, turn_flags=SECTION)
    engine = scripted(tokenizer, "plan", "two", "one", "</tool_call>", "end")
    group, _ = sample(config, engine.generate)
    (summary,) = group.trajectories
    assert [branch.turn_flags for branch in summary.branches] == [(), (), ((), (CALL,)), ()]
    assert summary.turn_flags == ((), (), (), (CALL,), ())


def test_stored_turns_keep_their_flags(folder: Path, tokenizer: Any, tmp_path: Path) -> None:
    config = experiment(folder, "StepDriven", {}, turn_flags=SECTION)
    group, sequences = sample(config, scripted(tokenizer, "a</think>b</think>", "2", "3").generate)
    files = RolloutFiles(tmp_path / "trajectories")
    files.begin(SampledBy("model", "checksum", 1.0, {}, turn_flags={"env": SECTION}))
    advantages = tuple(spread(each, (-5.0, 0.5, 0.5)) for each in sequences)
    summary = GroupSummary(5, 4, None, group.trajectories)
    files.write(1, [StoredGroup(1, summary, tuple(sequences), advantages)])
    read = files.group(1, 0)
    assert [turn.flags for turn in read.sequences[0].turns] == [(THINKING,), (), ()]
    assert read.summary.trajectories[0].turn_flags == ((THINKING,), (), ())
    assert summarize(read.sequences, 0).turn_flags == ((THINKING,), (), ())
    assert files.origin().turn_flags == {"env": SECTION}


def test_an_update_trains_on_the_advantages_of_flagged_turns(
    folder: Path, tokenizer: Any, tmp_path: Path
) -> None:
    """Before the first update ratios are 1, so the loss is less the mean of the tokens' advantages."""
    config = experiment(folder, "StepDriven", {}, turn_flags=SECTION)
    algorithm = config.algorithm.model_copy(update={"flagged_advantages": {CALL: -5.0}})
    config = config.model_copy(update={"algorithm": algorithm})
    group, (trajectory,) = sample(config, scripted(tokenizer, "1", "<tool_call> 2", "3").generate)
    lengths = [turn.end - turn.start for turn in trajectory.turns]
    host = start_host(config, tmp_path)
    try:
        update = updated(config, host, group)
    finally:
        host.close()
    # Alone in its group, the sample has the advantage 0.
    assert update.sums["loss/policy"] == pytest.approx(5.0 * lengths[1] / sum(lengths), rel=1e-5)
    assert update.grad_norm > 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose template shows the format of tool calls, so that answers are read."""
    made = save_tokenizer(tmp_path_factory.mktemp("chat"), TOOLS_TEMPLATE)
    torch.manual_seed(3)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=264, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=512, eos_token_id=IM_END,
            tie_word_embeddings=False,
        )
    ).save_pretrained(made)  # fmt: skip
    return made
