import json

import pytest
import reasoning_gym

from nemorl.config.data import ArithmeticDataset, DataConfig, ReasoningGymDataset, TasksDataset
from nemorl.data.datasets import NUM_ENCODED, DatasetError, load_tasks, row_errors
from nemorl.trajectories import Message


def arithmetic(**options) -> ArithmeticDataset:
    return ArithmeticDataset(name="arithmetic", **options)


def data(**options) -> DataConfig:
    return DataConfig(train=arithmetic(), **options)


def jsonl(tmp_path, *rows, **options) -> TasksDataset:
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return TasksDataset(name="jsonl", path=path, **options)


class TestArithmetic:
    def test_sums_are_padded_with_zeros_and_right(self):
        for task in load_tasks(arithmetic(size=50), data()):
            prompt = task.messages[0].content
            assert len(prompt) == 6
            assert len(task.answer) == 3
            left, right = prompt[:-1].split("+")
            assert int(left) + int(right) == int(task.answer)

    def test_a_sloppy_teacher_slips_in_the_given_share_and_always_at_the_same_sums(self):
        sloppy, right = (
            [t.answer for t in load_tasks(arithmetic(size=2000, wrong_answers=share), data())]
            for share in (0.4, 0)
        )
        again = [t.answer for t in load_tasks(arithmetic(size=2000, wrong_answers=0.4), data())]
        assert sloppy == again
        errors = [int(s) - int(r) for s, r in zip(sloppy, right, strict=True) if s != r]
        assert 0.35 < len(errors) / 2000 < 0.45
        assert {abs(e) if abs(e) < 100 else 200 - abs(e) for e in errors} == {1, 2, 10}

    def test_slips_are_those_asked_for(self):
        sloppy, right = (
            [int(t.answer) for t in load_tasks(arithmetic(wrong_answers=share, slips=(100, -3)), data())]
            for share in (1, 0)
        )
        assert {(s - r) % 200 for s, r in zip(sloppy, right, strict=True)} == {100, 197}

    def test_training_and_validation_share_no_task(self):
        def prompts(**options):
            return {task.messages[0].content for task in load_tasks(arithmetic(digits=1, **options), data())}

        train, validation = prompts(size=60), prompts(size=40, offset=60)
        assert len(train) == 60
        assert len(validation) == 40
        assert train | validation == {f"{a}+{b}=" for a in range(10) for b in range(10)}

    def test_the_order_comes_from_the_seed(self):
        first, again, other = (
            [t.messages for t in load_tasks(arithmetic(size=20, seed=seed), data())] for seed in (1, 1, 2)
        )
        assert first == again != other

    def test_a_million_million_pairs_cost_nothing(self):
        tasks = load_tasks(arithmetic(digits=6, size=10, offset=10), data())
        assert len({task.messages[0].content for task in tasks}) == 10

    def test_more_tasks_than_pairs_are_refused(self):
        with pytest.raises(DatasetError, match=r"offset 50 and size 60 .* 100 pairs"):
            load_tasks(arithmetic(digits=1, size=60, offset=50), data())


class TestReasoningGym:
    def test_tasks_are_the_librarys(self):
        config = ReasoningGymDataset(
            name="reasoning_gym", task="chain_sum", size=5, seed=3, options={"min_terms": 2, "max_terms": 2}
        )
        tasks = load_tasks(config, data(prompt_template="Q: {prompt}"))
        expected = reasoning_gym.create_dataset("chain_sum", size=5, seed=3, min_terms=2, max_terms=2)
        assert len(tasks) == 5
        for task, item in zip(tasks, expected, strict=True):
            assert task.messages == (Message("user", "Q: " + item["question"]),)
            assert task.answer == item["answer"]
            assert task.columns["metadata"] == item["metadata"]

    def test_an_index_past_the_end_is_an_error(self):
        config = ReasoningGymDataset(name="reasoning_gym", task="chain_sum", size=5)
        with pytest.raises(IndexError):
            load_tasks(config, data())[5]

    @pytest.mark.parametrize(
        ("task", "options", "message"),
        [
            ("chian_sum", {}, "chian_sum.*not registered"),
            ("chain_sum", {"terms": 2}, "chain_sum.*terms"),
            ("chain_sum", {"min_terms": 5, "max_terms": 2}, "chain_sum.*max_terms"),
        ],
    )
    def test_a_wrong_dataset_is_named(self, task, options, message):
        config = ReasoningGymDataset(name="reasoning_gym", task=task, options=options)
        with pytest.raises(DatasetError, match=message):
            load_tasks(config, data())


class TestJsonl:
    def test_texts_and_messages_become_openings(self, tmp_path):
        config = jsonl(
            tmp_path,
            {"prompt": "What is {1}?", "answer": 1, "level": "easy"},
            "\n",
            {
                "prompt": [{"role": "assistant", "content": "Hi"}, {"role": "user", "content": "2?"}],
                "answer": "2",
            },
        )
        tasks = load_tasks(config, data(system_prompt="Be brief.", prompt_template="{prompt} Think."))
        system = Message("system", "Be brief.")
        assert tasks[0].messages == (system, Message("user", "What is {1}? Think."))
        assert tasks[1].messages == (system, Message("assistant", "Hi"), Message("user", "2? Think."))
        assert [task.answer for task in tasks] == ["1", "2"]
        assert tasks[0].columns["level"] == "easy"

    def test_other_keys_and_no_answer(self, tmp_path):
        config = jsonl(tmp_path, {"question": "Why?"}, prompt_key="question", answer_key=None)
        (task,) = load_tasks(config, data())
        assert task.messages == (Message("user", "Why?"),)
        assert task.answer is None

    def test_a_key_with_dots_is_inside_of_nested_objects(self, tmp_path):
        """As verl's rows; a key that is written so is found first."""
        rows = {"prompt": "Why?", "a": {"b": {"c": "so"}}}, {"prompt": "Why?", "a.b.c": "flat", "a": 1}
        tasks = load_tasks(jsonl(tmp_path, *rows, answer_key="a.b.c"), data())
        assert [task.answer for task in tasks] == ["so", "flat"]
        with pytest.raises(DatasetError, match=r"key `a\.b\.d` is missing"):
            load_tasks(jsonl(tmp_path, rows[0], answer_key="a.b.d"), data())

    @pytest.mark.parametrize(
        ("row", "message"),
        [
            ('{"prompt": \n', "line 2: not JSON"),
            ("[1]\n", "line 2: expected a JSON object, not list"),
            (
                {"question": "a", "answer": "b"},
                r"line 2: key `prompt` is missing; the keys are \['answer', 'q",
            ),
            ({"prompt": "a"}, "line 2: key `answer` is missing.*answer_key"),
            ({"prompt": "a", "answer": [1]}, "line 2: key `answer`: expected a text or a number, not list"),
            ({"prompt": 3, "answer": "b"}, "line 2: key `prompt`: expected a text or a list of messages"),
            (
                {"prompt": [{"role": "bot", "content": "x"}], "answer": "b"},
                "message 0: `role` must be one of",
            ),
            ({"prompt": [{"role": "user", "content": 1}], "answer": "b"}, "message 0: `content` must be"),
            ({"prompt": [{"role": "system", "content": "x"}], "answer": "b"}, "line 2: .* no user message"),
        ],
    )
    def test_a_wrong_line_is_named(self, tmp_path, row, message):
        config = jsonl(tmp_path, {"prompt": "fine", "answer": "fine"}, row)
        with pytest.raises(
            DatasetError, match=f"tasks.jsonl, {message}" if message[:4] == "line" else message
        ):
            load_tasks(config, data())

    def test_two_system_prompts_are_refused(self, tmp_path):
        prompt = [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]
        with pytest.raises(DatasetError, match=r"line 1: .*`data.system_prompt` is set"):
            load_tasks(jsonl(tmp_path, {"prompt": prompt, "answer": "z"}), data(system_prompt="s"))

    def test_a_missing_or_empty_file_is_named(self, tmp_path):
        with pytest.raises(DatasetError, match=r"cannot read the dataset .*none\.jsonl"):
            load_tasks(TasksDataset(name="jsonl", path=tmp_path / "none.jsonl"), data())
        with pytest.raises(DatasetError, match=r"tasks\.jsonl holds no tasks"):
            load_tasks(jsonl(tmp_path), data())


def test_a_character_that_unicode_calls_a_line_break_does_not_end_a_row(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"prompt": "one\u2028two", "answer": "3"}\n', encoding="utf-8")
    dataset = TasksDataset(name="jsonl", path=path)
    (task,) = load_tasks(dataset, DataConfig(train=dataset))
    assert task.messages[-1].content == "one\u2028two"


def test_prompts_that_cannot_be_encoded_are_named_by_their_line(tmp_path):
    def encode(text: str) -> None:
        if "o" in text:
            raise Exception("no token for o")  # the class that tokenizers raises

    path = tmp_path / "tasks.jsonl"
    prompts = ["1+2=", "hello", *["3+4="] * (NUM_ENCODED - 2), "world"]  # the last one is not encoded
    path.write_text("".join(json.dumps({"prompt": p, "answer": "o"}) + "\n" for p in prompts))
    data = DataConfig(train=TasksDataset(name="jsonl", path=path))
    problem = f"{path}, line 2: the policy's tokenizer cannot encode 'hello': no token for o"
    assert row_errors(data.train, data, encode=encode) == [problem]
    assert row_errors(data.train, data) == []
