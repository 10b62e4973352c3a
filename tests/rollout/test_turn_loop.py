import asyncio
from dataclasses import replace

import numpy as np
import pytest

from nemorl.config.environment import EpisodeLimits
from nemorl.config.policy import PolicyConfig
from nemorl.data.tokenizer import ChatPrompts, Prompts, load_tokenizer
from nemorl.generation.types import SamplingParams
from nemorl.rollout.turn_loop import SampleKey, Sampler, TurnLimits, TurnLoop
from nemorl.trajectories import Message, Step, StopReason, Task, Turn
from tests.data.tokenizers import CHATML, ENDOFTEXT, IM_END, save_tokenizer
from tests.rollout.stand_ins import ScriptedEnvironment, ScriptedGenerator

TASK = Task(7, (Message("user", "add"),), answer="3")
KEY = SampleKey(run_seed=1, group=5, sample=2)
OBSERVE = Step((Message("tool", "12"),), {"step": 0.25}, done=False)
DONE = Step(rewards={"step": 0.5, "end": 1.0})


def run(tokenizer, generator, environment, prompts=None, group_seconds=None, **limits):
    """One conversation."""
    defaults = {
        "max_sequence_length": 1000,
        "max_new_tokens": 100,
        "stop_token_ids": tokenizer.end_token_ids,
        "stop_strings": (),
        "generation_seconds": 10.0,
        "environment_seconds": 5.0,
    }
    prompts = prompts or ChatPrompts(tokenizer)
    loop = TurnLoop(Sampler(generator, tokenizer, prompts, TurnLimits(**(defaults | limits))))
    (conversation,) = asyncio.run(loop.run(TASK, environment, KEY, SamplingParams(), seconds=group_seconds))
    return conversation


class TestTokens:
    def test_sampled_tokens_are_kept_though_encoding_their_text_gives_others(self, tokenizer):
        one, two = tokenizer.encode("1")[0], tokenizer.encode("2")[0]
        trap = [one, two, IM_END]  # reads "12", which encodes to a single token
        assert tokenizer.encode("12") != [one, two]
        final = [*tokenizer.encode("3"), IM_END]
        generator = ScriptedGenerator([trap, final])
        environment = ScriptedEnvironment([OBSERVE, DONE])
        conversation = run(tokenizer, generator, environment)

        opening = tokenizer.encode("<|im_start|>user\nadd<|im_end|>\n<|im_start|>assistant\n")
        between = tokenizer.encode("\n<|im_start|>tool\n12<|im_end|>\n<|im_start|>assistant\n")
        trajectory = conversation.trajectory
        assert trajectory.tokens.tolist() == opening + trap + between + final
        assert environment.actions[0].text == "12"
        # Every request continues the very tokens before it.
        assert generator.requests[0].prompt.tolist() == opening
        assert generator.requests[1].prompt.tolist() == opening + trap + between

    def test_mask_logprobs_and_versions_are_at_their_tokens(self, tokenizer):
        generator = ScriptedGenerator([[50, IM_END], [60, 61, IM_END]])
        trajectory = run(tokenizer, generator, ScriptedEnvironment([OBSERVE, DONE])).trajectory
        first, second = trajectory.turns
        assert (first.end - first.start, second.end - second.start) == (2, 3)
        sampled = [*range(first.start, first.end), *range(second.start, second.end)]
        assert trajectory.loss_mask.nonzero()[0].tolist() == sampled
        for position, token in enumerate(trajectory.tokens.tolist()):
            inside = position in sampled
            assert trajectory.logprobs[position] == pytest.approx(-token / 1000 if inside else 0)
            turn = 0 if position < first.end else 1
            assert trajectory.versions[position] == (turn if inside else -1)
        assert trajectory.num_sampled == 5

    def test_the_whole_is_what_the_template_makes_of_the_messages(self, tokenizer):
        # Where the sampled tokens are those that encoding gives, both ways must agree.
        first, second = "it is 12", "3"
        generator = ScriptedGenerator([[*tokenizer.encode(text), IM_END] for text in (first, second)])
        conversation = run(tokenizer, generator, ScriptedEnvironment([OBSERVE, DONE]))
        messages = (*conversation.opening, *conversation.exchange)
        assert [m.content for m in messages] == ["add", first, "12", second]
        whole = tokenizer.encode(tokenizer.render(messages, add_generation_prompt=False))
        newline = tokenizer.encode("\n")
        assert [*conversation.trajectory.tokens.tolist(), *newline] == whole

    def test_plain_conversations_are_texts_end_to_end(self, tokenizer):
        generator = ScriptedGenerator([[50, ENDOFTEXT], [60, ENDOFTEXT]])
        trajectory = run(
            tokenizer, generator, ScriptedEnvironment([OBSERVE, DONE]), Prompts(tokenizer)
        ).trajectory
        encode = tokenizer.encode
        assert trajectory.tokens.tolist() == [*encode("add"), 50, ENDOFTEXT, *encode("12"), 60, ENDOFTEXT]


class RecordingPrompts(Prompts):
    """Keeps what it is asked for between turns, and puts nothing there."""

    def __init__(self, tokenizer):
        super().__init__(tokenizer)
        self.asked = []

    def after_turn(self, history, turn, observation, last_token):
        self.asked.append(
            (
                [m.content for m in history],
                turn.content,
                [m.content for m in observation],
                last_token,
            )
        )
        return []


class TestTemplate:
    def test_it_gets_the_messages_before_a_turn_and_the_last_sampled_token(self, tokenizer):
        prompts = RecordingPrompts(tokenizer)
        (one,), (two,) = tokenizer.encode("1"), tokenizer.encode("2")
        generator = ScriptedGenerator([[one, IM_END], [], [two], [50, IM_END]])
        run(tokenizer, generator, ScriptedEnvironment([OBSERVE, OBSERVE, OBSERVE, DONE]), prompts)
        assert prompts.asked == [
            (["add"], "1", ["12"], IM_END),
            (["add", "1", "12"], "", ["12"], None),  # a turn may be empty
            (["add", "1", "12", "", "12"], "2", ["12"], two),
        ]


class RoutingGenerator(ScriptedGenerator):
    """Returns, for what it read, the number of its turn, from the position that is asked for."""

    async def generate(self, request, on_progress=None):
        answer = await super().generate(request)
        read = len(request.prompt) + len(answer.tokens) - 1
        size = (read - request.routed_experts_from, 3, 2)
        return replace(answer, routed_experts=np.full(size, len(self.requests), dtype=np.int16))


class TestExperts:
    def test_each_turn_reports_those_of_what_it_read_first(self, tokenizer):
        generator = RoutingGenerator([[50, IM_END], [60, 61, IM_END]])
        trajectory = run(tokenizer, generator, ScriptedEnvironment([OBSERVE, DONE])).trajectory
        first, second = trajectory.turns
        # The last token of a turn is read in the next one, and that of the conversation never.
        expected = [1] * (first.end - 1) + [2] * (second.end - first.end) + [-1]
        assert trajectory.routed_experts.shape == (trajectory.num_tokens, 3, 2)
        assert trajectory.routed_experts.dtype == np.int16
        assert trajectory.routed_experts[:, 1, 1].tolist() == expected
        assert [asked.routed_experts_from for asked in generator.requests] == [0, first.end - 1]

    def test_a_single_turn_leaves_its_last_token_unknown(self, tokenizer):
        generator = RoutingGenerator([[50, 51, IM_END]])
        trajectory = run(tokenizer, generator, ScriptedEnvironment([DONE])).trajectory
        assert trajectory.routed_experts[:, 0, 0].tolist() == [1] * (trajectory.num_tokens - 1) + [-1]

    def test_an_engine_that_reports_none_leaves_none(self, tokenizer):
        trajectory = run(tokenizer, ScriptedGenerator([[50, IM_END]]), ScriptedEnvironment([DONE])).trajectory
        assert trajectory.routed_experts is None


class TestEnds:
    def test_rewards_add_up_over_turns(self, tokenizer):
        environment = ScriptedEnvironment([OBSERVE, OBSERVE, DONE])
        trajectory = run(tokenizer, ScriptedGenerator([[50, IM_END]] * 3), environment).trajectory
        assert trajectory.rewards == {"step": 1.0, "end": 1.0}
        assert trajectory.reward == 0.0  # which their weights decide later
        assert (trajectory.group, trajectory.task, trajectory.stop) == (5, 7, StopReason.STOP)
        assert environment.closes == 1

    def test_a_turn_that_was_cut_ends_the_conversation(self, tokenizer):
        generator = ScriptedGenerator([[50, 51, 52]], {0: StopReason.LENGTH})
        environment = ScriptedEnvironment([OBSERVE])
        trajectory = run(tokenizer, generator, environment, max_new_tokens=2).trajectory
        assert trajectory.stop is StopReason.LENGTH
        assert trajectory.num_sampled == 2
        assert trajectory.rewards == {"step": 0.25}
        # All that was sampled is text: there was no end token to leave out.
        assert environment.actions[0].text == tokenizer.decode([50, 51])

    def test_the_environment_sets_stop_strings_of_each_turn(self, tokenizer):
        """Those of the run are in all."""
        steps = [replace(OBSERVE, stop_strings=("</move>", "?")), OBSERVE, DONE]
        generator, environment = ScriptedGenerator([[50, IM_END]] * 3), ScriptedEnvironment(steps)
        environment.stop_strings = ("</plan>",)
        run(tokenizer, generator, environment, stop_strings=("END",))
        asked = [request.stop_strings for request in generator.requests]
        assert asked == [("END", "</plan>"), ("END", "</move>", "?"), ("END",)]

    def test_a_full_sequence_ends_the_conversation_before_the_observation(self, tokenizer):
        opening = len(ChatPrompts(tokenizer).open(TASK.messages))
        generator = ScriptedGenerator([[50, IM_END]] * 2)
        trajectory = run(
            tokenizer, generator, ScriptedEnvironment([OBSERVE, DONE]), max_sequence_length=opening + 10
        ).trajectory
        assert trajectory.stop is StopReason.LENGTH
        assert trajectory.error is None
        assert trajectory.turns == (Turn(opening, opening + 2, StopReason.STOP, OBSERVE.rewards),)
        assert trajectory.num_tokens == opening + 2

    def test_a_turn_follows_only_if_a_token_of_it_has_room(self, tokenizer):
        prompts = ChatPrompts(tokenizer)
        opening = len(prompts.open(TASK.messages))
        turn, observation = Message("assistant", tokenizer.decode([50])), OBSERVE.messages
        between = len(prompts.after_turn(TASK.messages, turn, observation, IM_END))
        for room, turns in ((0, 1), (1, 2)):
            generator = ScriptedGenerator([[50, IM_END]] * 2)
            limit = opening + 2 + between + room
            environment = ScriptedEnvironment([OBSERVE, DONE])
            run(tokenizer, generator, environment, max_sequence_length=limit)
            assert len(generator.requests) == turns
        assert generator.requests[1].max_new_tokens == 1

    def test_times_of_generation_and_environment_add_up_over_turns(self, tokenizer):
        class SlowGenerator(ScriptedGenerator):
            async def generate(self, request, on_progress=None):
                await asyncio.sleep(0.02)
                return await super().generate(request)

        class SlowEnvironment(ScriptedEnvironment):
            async def step(self, action):
                await asyncio.sleep(0.01)
                return await super().step(action)

        generator, environment = SlowGenerator([[50, IM_END]] * 2), SlowEnvironment([OBSERVE, DONE])
        trajectory = run(tokenizer, generator, environment).trajectory
        assert 0.04 <= trajectory.seconds_generation < 10
        assert 0.02 <= trajectory.seconds_environment < 10

    def test_the_time_of_the_model_in_an_episode_ends_it(self, tokenizer):
        class SlowGenerator(ScriptedGenerator):
            async def generate(self, request, on_progress=None):
                await asyncio.sleep(request.deadline_seconds)
                return await super().generate(request)

        # The engine ends a turn at its deadline, which is what the limit leaves and not the turn's own.
        episode = EpisodeLimits(model_seconds=0.1)
        for stop in (StopReason.ABORT, StopReason.STOP):
            generator = SlowGenerator([[50, 51]], {0: stop})
            trajectory = run(tokenizer, generator, ScriptedEnvironment([OBSERVE]), episode=episode).trajectory
            assert [request.deadline_seconds for request in generator.requests] == [0.1]
            assert (trajectory.error, trajectory.stop) == (None, StopReason.LENGTH)
            assert (trajectory.num_sampled, trajectory.rewards) == (2, {"step": 0.25})

    def test_a_turn_never_asks_for_more_than_the_sequence_holds(self, tokenizer):
        opening = len(ChatPrompts(tokenizer).open(TASK.messages))
        generator = ScriptedGenerator([[50] * 9], {0: StopReason.LENGTH})
        trajectory = run(
            tokenizer, generator, ScriptedEnvironment([DONE]), max_sequence_length=opening + 4
        ).trajectory
        assert generator.requests[0].max_new_tokens == 4
        assert trajectory.num_tokens == opening + 4


class TestFailures:
    def assert_failed(self, trajectory, *, match):
        assert match in trajectory.error
        assert trajectory.stop in (StopReason.ERROR, StopReason.ABORT)
        assert not trajectory.loss_mask.any()
        assert trajectory.rewards == {}

    def test_a_raising_environment_ends_its_trajectory(self, tokenizer):
        environment = ScriptedEnvironment([OBSERVE, KeyError("lost")])
        trajectory = run(tokenizer, ScriptedGenerator([[50, IM_END]] * 2), environment).trajectory
        self.assert_failed(trajectory, match="environment step 2: KeyError: 'lost'")
        assert trajectory.versions.max() == 1  # what was sampled is still there to be looked at
        assert environment.closes == 1

    def test_a_hanging_environment_ends_its_trajectory(self, tokenizer):
        environment = ScriptedEnvironment([None])
        trajectory = run(
            tokenizer, ScriptedGenerator([[50, IM_END]]), environment, environment_seconds=0.05
        ).trajectory
        self.assert_failed(trajectory, match="environment step 1: no answer within 0.05 s")
        assert trajectory.seconds_environment >= 0.05
        assert environment.closes == 1

    def test_the_time_of_the_environment_in_an_episode_limits_the_sum_of_its_calls(self, tokenizer):
        class SlowEnvironment(ScriptedEnvironment):
            async def step(self, action):
                await asyncio.sleep(0.6)
                return await super().step(action)

        environment = SlowEnvironment([OBSERVE, DONE])
        episode = EpisodeLimits(environment_seconds=1.0)  # each call alone would be in time
        trajectory = run(
            tokenizer, ScriptedGenerator([[50, IM_END]] * 2), environment, episode=episode
        ).trajectory
        self.assert_failed(trajectory, match="environment step 2: no answer within 0.")
        assert len(environment.actions) == 1
        assert environment.closes == 1

    def test_an_environment_that_will_not_be_cancelled_is_left_behind(self, tokenizer):
        class Stubborn(ScriptedEnvironment):
            async def step(self, action):
                for _ in range(4):
                    try:
                        await asyncio.sleep(0.5)
                    except asyncio.CancelledError:
                        continue
                return DONE

        trajectory = run(
            tokenizer, ScriptedGenerator([[50, IM_END]]), Stubborn([]), environment_seconds=0.05
        ).trajectory
        self.assert_failed(trajectory, match="environment step 1: no answer")

    def test_the_deadline_of_its_group_ends_a_trajectory_with_a_hanging_environment(self, tokenizer):
        environment = ScriptedEnvironment([None])
        trajectory = run(
            tokenizer, ScriptedGenerator([[50, IM_END]]), environment, group_seconds=0.05
        ).trajectory
        assert trajectory.stop is StopReason.DEADLINE
        assert trajectory.error == "not finished within `algorithm.group_seconds`"
        assert not trajectory.loss_mask.any()
        assert environment.closes == 1

    def test_a_failing_reset_or_close_is_no_worse(self, tokenizer, caplog):
        class Broken(ScriptedEnvironment):
            async def reset(self, task):
                raise RuntimeError("no room")

            async def close(self):
                raise RuntimeError("nor a door")

        trajectory = run(tokenizer, ScriptedGenerator([]), Broken([])).trajectory
        self.assert_failed(trajectory, match="environment reset: RuntimeError: no room")
        assert trajectory.num_tokens == 0
        assert "sample 5/2 of task 7: environment close: RuntimeError: nor a door" in caplog.text

    @pytest.mark.parametrize(
        ("answer", "problem"),
        [
            (7, "TypeError: returned 7; return a Step"),
            (
                Step(rewards={"right": float("nan")}),
                "TypeError: gave the reward 'right' the value nan; return a",
            ),
            (Step(rewards=1.0), "TypeError: gave the rewards 1.0; return a dict"),  # type: ignore[arg-type]
            (Step(messages="more"), "TypeError: returned the messages 'more'; return a tuple"),  # type: ignore[arg-type]
            (Step(done="no"), "TypeError: returned done='no'; return True or False"),  # type: ignore[arg-type]
            (Step(stop_strings="</a>"), "TypeError: returned the stop_strings '</a>'; give a tuple"),  # type: ignore[arg-type]
            (SystemExit(3), "RuntimeError: SystemExit: 3"),
        ],
    )
    def test_a_step_that_is_none_or_ends_the_program_fails_alone(self, tokenizer, answer, problem):
        class Wrong(ScriptedEnvironment):
            async def step(self, action):
                if isinstance(answer, SystemExit):
                    raise answer
                return answer

        environment = Wrong([])
        trajectory = run(tokenizer, ScriptedGenerator([[50, IM_END]]), environment).trajectory
        self.assert_failed(trajectory, match=f"environment step 1: {problem}")
        assert environment.closes == 1

    def test_what_went_well_is_not_logged(self, tokenizer, caplog):
        run(tokenizer, ScriptedGenerator([[50, IM_END]]), ScriptedEnvironment([DONE]))
        assert not caplog.records

    def test_an_aborted_turn_trains_nothing(self, tokenizer):
        generator = ScriptedGenerator([[50]], {0: StopReason.ABORT})
        trajectory = run(tokenizer, generator, ScriptedEnvironment([DONE])).trajectory
        self.assert_failed(trajectory, match="generation of turn 1: ended with `abort`")
        assert trajectory.stop is StopReason.ABORT

    def test_a_prompt_without_room_is_counted_as_an_error(self, tokenizer):
        trajectory = run(
            tokenizer, ScriptedGenerator([]), ScriptedEnvironment([]), max_sequence_length=5
        ).trajectory
        self.assert_failed(trajectory, match="leave no room in `policy.max_sequence_length` of 5")

    def test_a_prompt_beyond_the_limit_of_prompts_is_not_sampled(self, tokenizer):
        opening = len(ChatPrompts(tokenizer).open(TASK.messages))
        generator = ScriptedGenerator([[50, IM_END]])
        environment = ScriptedEnvironment([DONE])
        kept = run(tokenizer, generator, environment, max_prompt_tokens=opening).trajectory
        assert kept.error is None
        refused = ScriptedGenerator([])
        trajectory = run(
            tokenizer, refused, ScriptedEnvironment([]), max_prompt_tokens=opening - 1
        ).trajectory
        problem = f"{opening} tokens, more than `data.max_prompt_tokens`, {opening - 1}"
        self.assert_failed(trajectory, match=problem)
        assert refused.requests == []

    def test_a_prompt_as_long_as_the_sequence_has_no_room(self, tokenizer):
        opening = len(ChatPrompts(tokenizer).open(TASK.messages))
        generator = ScriptedGenerator([])
        trajectory = run(
            tokenizer, generator, ScriptedEnvironment([]), max_sequence_length=opening
        ).trajectory
        self.assert_failed(trajectory, match=f"{opening} tokens leave no room")
        assert generator.requests == []

    def test_a_failing_engine_ends_the_run(self, tokenizer):
        class Dead:
            async def generate(self, request, on_progress=None):
                raise ConnectionError("engine gone")

        environment = ScriptedEnvironment([])
        with pytest.raises(ConnectionError, match="engine gone"):
            run(tokenizer, Dead(), environment)
        assert environment.closes == 1


class TestSeeds:
    def test_every_turn_of_every_sample_has_a_seed_of_its_own(self):
        seeds = {
            SampleKey(run_seed, group, sample, validation).seed(turn)
            for run_seed in range(3)
            for group in range(10)
            for sample in range(10)
            for turn in range(3)
            for validation in (False, True)
        }
        assert len(seeds) == 3 * 10 * 10 * 3 * 2
        assert all(0 <= seed < 2**63 for seed in seeds)

    def test_a_seed_is_the_same_in_every_process(self):
        # Written down once: a change here changes every run that is resumed.
        assert SampleKey(42, 3, 1).seed(0) == 5908693419112587767

    def test_requests_carry_them(self, tokenizer):
        generator = ScriptedGenerator([[50, IM_END]] * 2)
        run(tokenizer, generator, ScriptedEnvironment([OBSERVE, DONE]))
        assert [r.seed for r in generator.requests] == [KEY.seed(0), KEY.seed(1)]
        assert [r.id for r in generator.requests] == ["5/2/0", "5/2/1"]
        assert {r.conversation for r in generator.requests} == {"5/2"}

    def test_samples_of_validation_have_names_of_their_own(self):
        assert str(SampleKey(1, 5, 2)) == "5/2"
        assert str(SampleKey(1, 5, 2, validation=True)) == "validation-5/2"


# As Qwen2.5 writes tools, calls and results, without its instructions.
HERMES = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }} Call: <tool_call><|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}\n"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


class TestTools:
    def converse(self, tmp_path, template, first):
        """A turn of this text, the result of its calls, and an answer."""
        tokenizer = load_tokenizer(PolicyConfig(model_path=save_tokenizer(tmp_path, template)))
        environment = ScriptedEnvironment([OBSERVE, DONE])
        environment.tools = [ADD]
        generator = ScriptedGenerator([[*tokenizer.encode(text), IM_END] for text in (first, "3")])
        return tokenizer, environment, run(tokenizer, generator, environment)

    def test_calls_are_read_and_their_tokens_stay_as_sampled(self, tmp_path):
        # Not the spelling of the template: the arguments come first, and there is no white space.
        call = '<tool_call>{"arguments":{"a":1},"name":"add"}</tool_call>'
        tokenizer, environment, conversation = self.converse(tmp_path, HERMES, f"So: {call}")
        action, _ = environment.actions
        assert (action.content, action.call_errors) == ("So:", ())
        (made,) = action.tool_calls
        assert (made.name, made.arguments) == ("add", {"a": 1})
        assert conversation.exchange[0] == Message("assistant", "So:", (made,))
        text = tokenizer.decode(conversation.trajectory.tokens.tolist())
        assert text.startswith('<|im_start|>system\n[{"type": "function", "function": {"name": "add"')
        assert (
            f"So: {call}<|im_end|>\n<|im_start|>tool\n12<|im_end|>\n<|im_start|>assistant\n3<|im_end|>"
            in text
        )

    def test_a_call_that_cannot_be_read_is_an_error_for_the_environment(self, tmp_path):
        _, environment, conversation = self.converse(tmp_path, HERMES, "<tool_call>{add}</tool_call>")
        action, _ = environment.actions
        assert action.tool_calls == ()
        assert action.call_errors[0].startswith("Tool call 1 cannot be read: invalid JSON")
        assert conversation.exchange[0].content == "<tool_call>{add}</tool_call>"
        assert conversation.trajectory.error is None

    @pytest.mark.parametrize(
        ("template", "says"),
        [
            (CHATML, "shows no known format of tool calls: set policy.tokenizer.tool_format"),
            (CHATML + "{# <tool_call> #}", "does not show tools to the model"),
        ],
    )
    def test_a_template_without_tools_is_named(self, tmp_path, template, says):
        _, environment, conversation = self.converse(tmp_path, template, "3")
        assert environment.actions == []
        assert says in conversation.trajectory.error
