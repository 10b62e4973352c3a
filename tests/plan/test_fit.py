"""What is wrong beyond the configuration: the model, the files it names, the machine."""

import importlib.util
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from nemorl.config.data import DatasetConfig, FeedbackDataset
from nemorl.errors import Problem
from nemorl.models.registry import load_shape
from nemorl.plan.machine import Gpu, Machine, memory_problems
from nemorl.plan.memory import ProcessMemory, estimate_memory
from nemorl.plan.problems import file_problems, plan_run
from tests.plan.conftest import Configure
from tests.plan.models import CONFIG, write_model
from tests.plan.test_layouts import EXPERTS

ROOMY = Machine(cores=8, memory_bytes=10**11, shared_memory_bytes=10**10, gpus=())


@pytest.fixture(autouse=True)
def _no_cluster_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def only_problem(configure: Configure, *overrides: str, machine: Machine = ROOMY) -> Problem:
    (problem,) = plan_run(configure(*overrides), machine).problems
    return problem


def test_a_sound_experiment_fits(configure: Configure) -> None:
    plan = plan_run(configure(), ROOMY)

    assert plan.problems == ()
    assert [process.group for process in plan.processes] == ["driver", "policy", "generation", "rollout"]


@pytest.mark.parametrize(
    ("overrides", "field", "value", "fix"),
    [
        (
            ["policy.layout.tensor_parallel_size=16"],
            "policy.layout.tensor_parallel_size",
            16,
            "it must divide the model's 8 attention heads: 1, 2, 4, 8 do",
        ),
        (
            ["policy.layout.pipeline_parallel_size=4"],
            "policy.layout.pipeline_parallel_size",
            4,
            "it must divide the model's 6 layers: 1, 2, 3, 6 do",
        ),
        (
            ["policy.lora={rank: 4, alpha: 8, targets: [q_proj, kv_b_proj]}"],
            "policy.lora.targets",
            ["q_proj", "kv_b_proj"],
            "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj can have an adapter: "
            "remove kv_b_proj",
        ),
        (
            ["policy.lora={rank: 4, alpha: 8, targets: []}"],
            "policy.lora.targets",
            [],
            "can have an adapter: name some of them, or all-linear",
        ),
        (
            ["policy.lora={rank: 4, alpha: 8, targets: [q_proj, v_proj, q_proj]}"],
            "policy.lora.targets",
            ["q_proj", "v_proj", "q_proj"],
            "a matrix has one adapter: name q_proj once",
        ),
        (
            # keys are 4 heads of 16
            ["policy.lora={rank: 65, alpha: 8, targets: [q_proj, k_proj, down_proj]}"],
            "policy.lora.rank",
            65,
            "model.layers.0.self_attn.k_proj has a side of 64, and no higher rank than that",
        ),
        (
            ["policy.max_sequence_length=4096", "policy.micro_batch_tokens=4096"],
            "policy.max_sequence_length",
            4096,
            "the model knows positions up to 2048",
        ),
        (
            ["generation.stop_token_ids=[5, 1000]"],
            "generation.stop_token_ids",
            [5, 1000],
            "the model's vocabulary ends at 999: remove 1000",
        ),
        (["data.chat=true"], "data.chat", True, "has no chat template: set this to false for plain text"),
        (
            ["data.chat=true", "policy.tokenizer.chat_template=nowhere.jinja"],
            "policy.tokenizer.chat_template",
            "nowhere.jinja",
            "there is no such file",
        ),
        (
            ["policy.tokenizer.path=nowhere"],
            "policy.tokenizer.path",
            "nowhere",
            "the folder holds no tokenizer.json",
        ),
        (
            ["data.train={name: jsonl, path: nowhere.jsonl}"],
            "data.train.path",
            "nowhere.jsonl",
            "the file cannot be read: No such file or directory",
        ),
    ],
)
def test_it_is_refused_with_field_value_and_fix(
    configure: Configure, overrides: list[str], field: str, value: Any, fix: str
) -> None:
    problem = only_problem(configure, *overrides)

    assert (problem.field, problem.value) == (field, value)
    assert fix in problem.fix


def test_everything_wrong_is_listed_at_once(configure: Configure) -> None:
    experiment = configure(
        "policy.layout.tensor_parallel_size=3",
        "policy.layout.pipeline_parallel_size=5",
        "data.train={name: jsonl, path: nowhere.jsonl}",
    )

    plan = plan_run(experiment, ROOMY)

    # three attention heads, key-value heads: 3 divides the MLP's 384
    assert [problem.field for problem in plan.problems] == [
        "data.train.path",
        "policy.layout.tensor_parallel_size",
        "policy.layout.tensor_parallel_size",
        "policy.layout.pipeline_parallel_size",
    ]
    assert plan.processes == ()


def test_a_missing_model_is_reported_once(configure: Configure) -> None:
    problem = only_problem(configure, "policy.model_path=nowhere")

    assert (problem.field, problem.value) == ("policy.model_path", "nowhere")
    assert problem.fix.startswith("there is no such folder")


def test_an_unsupported_model_says_why(configure: Configure, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "falcon")
    (folder / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["FalconForCausalLM"]}))

    problem = only_problem(configure, f"policy.model_path={folder}")

    assert problem.field == "policy.model_path"
    assert "FalconForCausalLM" in problem.fix


def test_the_embedded_engine_requires_whole_contexts(configure: Configure, tmp_path: Path) -> None:
    mistral = {"architectures": ["MistralForCausalLM"], "sliding_window": 512}
    folder = write_model(tmp_path / "mistral", **mistral)
    experiment = [f"policy.model_path={folder}", "policy.micro_batch_tokens=1024"]

    assert plan_run(configure(*experiment, "policy.max_sequence_length=512"), ROOMY).problems == ()
    problem = only_problem(configure, *experiment, "policy.max_sequence_length=513")
    assert (problem.field, problem.value) == ("generation.backend", "torch")
    assert "Llama-like models only, and this one has sliding windows" in problem.fix


@pytest.mark.parametrize(
    ("head_dim", "precision", "gpus", "is_refused"),
    [
        (4, "bfloat16", 1, True),
        (20, "bfloat16", 1, True),
        (264, "bfloat16", 1, True),
        (256, "bfloat16", 1, False),
        (8, "bfloat16", 1, False),
        (4, "float32", 1, False),
        (4, "bfloat16", 0, False),
    ],
)
def test_heads_of_a_gpus_attention_have_sizes_that_its_kernels_take(
    configure: Configure, tmp_path: Path, head_dim: int, precision: str, gpus: int, is_refused: bool
) -> None:
    folder = write_model(tmp_path / "heads", head_dim=head_dim)
    sft = ["algorithm.name=sft", "algorithm.num_steps=1", "algorithm.batch_size=4"]
    on = [f"policy.precision={precision}", f"cluster.gpus_per_node={gpus}"]
    problems = plan_run(configure(f"policy.model_path={folder}", *sft, *on), ROOMY).problems
    if not is_refused:
        assert problems == ()
        return
    (problem,) = problems
    assert (problem.field, problem.value) == ("policy.precision", "bfloat16")
    heads = f"takes heads of a multiple of 8 and at most 256, and the model's have {head_dim} dimensions"
    assert problem.fix == f"on a GPU its attention {heads}: set float32, or take another model"


def test_an_adapter_may_be_as_wide_as_its_matrix(configure: Configure) -> None:
    lora = "policy.lora={rank: 64, alpha: 8, targets: [k_proj, q_proj]}"

    assert plan_run(configure(lora), ROOMY).problems == ()


def test_sinks_require_bfloat16_on_a_gpu(configure: Configure, tmp_path: Path) -> None:
    gpt_oss = {
        "architectures": ["GptOssForCausalLM"],
        "head_dim": 16,
        "attention_bias": True,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
    }
    sft = ["algorithm.name=sft", "algorithm.num_steps=1", "algorithm.batch_size=4"]
    folder = write_model(tmp_path / "gpt-oss", **gpt_oss)
    model = [f"policy.model_path={folder}", *sft]

    assert plan_run(configure(*model), ROOMY).problems == ()
    on_gpu = configure(*model, "cluster.gpus_per_node=1")
    (problem,) = plan_run(on_gpu, ROOMY).problems
    assert (problem.field, problem.value) == ("policy.precision", "float32")
    assert "the kernel for attention sinks" in problem.fix
    assert plan_run(configure(*model, "cluster.gpus_per_node=1", "policy.precision=bfloat16"), ROOMY)


@pytest.mark.parametrize(
    ("overrides", "model", "field", "fix"),
    [
        (["z_loss_coefficient: 0.1"], CONFIG, "z_loss_coefficient", "the model has no experts: remove this"),
        (["bias_update_rate: 0.1"], CONFIG, "bias_update_rate", "the model has no experts: remove this"),
        (["bias_update_rate: 0.1"], EXPERTS, "bias_update_rate", "have no bias that balances experts"),
    ],
)
def test_routers_are_trained_as_the_model_has_them(
    configure: Configure, tmp_path: Path, overrides: list[str], model: dict[str, Any], field: str, fix: str
) -> None:
    folder = write_model(tmp_path / "other", **model)
    moe = f"policy.moe={{{', '.join(overrides)}}}"
    problems = plan_run(configure(f"policy.model_path={folder}", moe), ROOMY).problems
    (problem,) = [problem for problem in problems if problem.field.startswith("policy.moe")]
    assert (problem.field, problem.value) == (f"policy.moe.{field}", 0.1)
    assert fix in problem.fix


def test_norms_that_are_computed_with_matrices_cannot_be_recomputed(configure: Configure) -> None:
    selective = "policy.recompute={name: selective, modules: [core_attn, layernorm]}"
    engine = ["cluster.gpus_per_node=2", "policy.kernels=transformer_engine"]

    problem = only_problem(configure, selective, *engine)

    assert (problem.field, problem.value) == ("policy.recompute.modules", ["core_attn", "layernorm"])
    assert "remove layernorm" in problem.fix
    assert plan_run(configure(selective, "cluster.gpus_per_node=2"), ROOMY).problems == ()


def test_a_model_without_weights_is_refused(configure: Configure, model: Path) -> None:
    (model / "model.safetensors").unlink()

    assert "the folder holds no weights" in only_problem(configure).fix


@pytest.mark.parametrize("place", ["tokenizer_config.json", "chat_template.jinja"])
def test_a_chat_template_is_found_where_tokenizers_keep_it(
    configure: Configure, model: Path, place: str
) -> None:
    text = (
        json.dumps({"chat_template": "{{ messages }}"}) if place.endswith("config.json") else "{{ messages }}"
    )
    (model / place).write_text(text, encoding="utf-8")

    assert plan_run(configure("data.chat=true"), ROOMY).problems == ()


@pytest.mark.parametrize(
    ("line", "field", "fix"),
    [
        ('{"prompt": "1+1=", "answer": "2"}', None, ""),
        ('\n{"prompt": "1+1=", "answer": "2"}', None, ""),
        ('{"question": "1+1=", "answer": "2"}', "data.train.prompt_key", "but `question`, `answer`"),
        ('{"prompt": "1+1="}', "data.train.answer_key", "but `prompt`"),
        ('["1+1=", "2"]', "data.train.path", "expected a JSON object, not list"),
        ("prompt,answer", "data.train.path", "not JSON"),
        ("", "data.train.path", "the file is empty; write one JSON object per line"),
    ],
)
def test_the_first_task_shows_wrong_files_and_keys(
    configure: Configure, tmp_path: Path, line: str, field: str | None, fix: str
) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text(line + "\n", encoding="utf-8")

    problems = plan_run(configure(f"data.train={{name: jsonl, path: {file}}}"), ROOMY).problems

    assert [problem.field for problem in problems] == ([field] if field else [])
    assert all(fix in problem.fix for problem in problems)


@pytest.mark.parametrize(
    ("place", "kind", "line", "field"),
    [
        ("train", "conversations", '{"messages": []}', "path"),
        ("train", "conversations", '{"turns": []}', "messages_key"),
        ("train", "preference", '{"prompt": "a", "chosen": "b", "rejected": "c"}', None),
        ("train", "preference", '{"prompt": "a", "chosen": "b"}', "rejected_key"),
        ("train", "feedback", "", "path"),
        ("train", "steps", '{"prompt": "a", "labels": []}', "steps_key"),
        ("train", "steps", None, "path"),
        ("validation", "jsonl", None, "path"),
        ("validation_sets.more", "jsonl", "", "path"),
        ("validation_sets.more", "jsonl", None, "path"),
    ],
)
def test_every_file_of_data_is_looked_at(
    configure: Configure, tmp_path: Path, place: str, kind: str, line: str | None, field: str | None
) -> None:
    file = tmp_path / "tasks.jsonl"
    if line is not None:
        file.write_text(line, encoding="utf-8")
    experiment = configure()
    dataset = TypeAdapter(DatasetConfig).validate_python({"name": kind, "path": file})
    name, _, further = place.partition(".")
    data = experiment.data.model_copy(update={name: {further: dataset} if further else dataset})

    problems = list(file_problems(experiment.model_copy(update={"data": data})))

    assert [problem.field for problem in problems] == ([f"data.{place}.{field}"] if field else [])


def few_tasks(count: int) -> Iterator[dict[str, str]]:
    for number in range(count):
        yield {"prompt": f"{number}+1=", "answer": str(number + 1)}
    if count == 103:
        raise LookupError("no more")


@pytest.mark.parametrize(
    ("dataset", "field", "fix"),
    [
        ("{name: tasks, path: FILE, stream: {size: 12}}", None, ""),
        ("{name: tasks, path: FILE, stream: {size: 13}}", "stream.size", "has 12 rows; set it to 12 or less"),
        ("{name: generator, function: HERE, arguments: {count: 9}, size: 9}", None, ""),
        (
            "{name: generator, function: HERE, arguments: {count: 9}, size: 10}",
            "size",
            "has 9 rows; set it to 9",
        ),
        ("{name: generator, function: HERE, arguments: {count: 103}, size: 110}", "function", "LookupError"),
    ],
)
def test_streams_have_as_many_rows_as_are_asked_for(
    configure: Configure, tmp_path: Path, dataset: str, field: str | None, fix: str
) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text("\n".join(map(json.dumps, few_tasks(12))), encoding="utf-8")
    given = dataset.replace("FILE", str(file)).replace("HERE", f"'{__name__}:few_tasks'")
    data = ["data.validation=null", "algorithm.validation={}"]

    trained = plan_run(configure(f"data.train={given}", *data), ROOMY).problems
    mixed = f"data.train={{name: mixture, sources: {{some: {{dataset: {given}}}}}}}"
    of_source = plan_run(configure(mixed, *data), ROOMY).problems

    assert [problem.field for problem in trained] == ([f"data.train.{field}"] if field else [])
    assert all(fix in problem.fix for problem in trained)
    source = "data.train.sources.some.dataset"
    assert [problem.field for problem in of_source] == ([f"{source}.{field}"] if field else [])


RIGHT = '{"prompt": "1+1=", "completion": "2", "label": true}'


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ('{"prompt": "1+1=", "compl', "line 3: not JSON"),
        ('{"prompt": "1+1=", "completion": "3", "label": "no"}', "line 3: key `label`: expected true"),
        ('{"prompt": "1+1=", "completion": "3"}', "line 3: key `label` is missing"),
        ('{"prompt": [], "completion": "3", "label": false}', "line 3: key `prompt`"),
    ],
)
def test_every_line_of_a_file_is_looked_at(configure: Configure, tmp_path: Path, line: str, fix: str) -> None:
    file = tmp_path / "judged.jsonl"
    file.write_text(f"{RIGHT}\n\n{line}\n{RIGHT}\n", encoding="utf-8")
    experiment = configure()
    data = experiment.data.model_copy(update={"train": FeedbackDataset(name="feedback", path=file)})

    (problem,) = file_problems(experiment.model_copy(update={"data": data}))

    assert (problem.field, problem.value) == ("data.train.path", str(file))
    assert problem.fix.startswith(fix)


def test_of_many_wrong_lines_the_first_are_named(configure: Configure, tmp_path: Path) -> None:
    file = tmp_path / "judged.jsonl"
    file.write_text("\n".join([RIGHT, *["{}"] * 1000]), encoding="utf-8")
    experiment = configure()
    data = experiment.data.model_copy(update={"train": FeedbackDataset(name="feedback", path=file)})

    problems = list(file_problems(experiment.model_copy(update={"data": data})))

    assert [problem.fix.partition(":")[0] for problem in problems] == [f"line {n}" for n in range(2, 7)]


SMALL = Machine(cores=2, memory_bytes=3_000_000_000, shared_memory_bytes=10**9, gpus=())


@pytest.mark.parametrize(
    ("overrides", "field", "value", "fix"),
    [
        (
            ["generation.replicas=8"],
            "generation.replicas",
            8,
            "3.2 GB of that for the runtime of the generation processes, and this machine has 3.0 GB; start",
        ),
        (
            ["generation={backend: vllm, kv_cache_gigabytes: 50}"],
            "generation.kv_cache_gigabytes",
            50,
            "53.7 GB of that for the kv cache of the generation processes, and this machine has 3.0 GB; ",
        ),
        (
            ["generation.backend=megatron", "generation={max_kv_tokens: 9000000, max_batch_size: 100000}"],
            "generation.max_batch_size",
            100000,
            "kv cache of the policy processes",
        ),
        (
            ["generation.backend=megatron", "generation={max_kv_tokens: 9000000, max_batch_size: 1000000}"],
            "generation.max_kv_tokens",
            9000000,
            "lower it",
        ),
        (["cluster.object_store_megabytes=9000"], "cluster.object_store_megabytes", 9000, "lower it"),
        (["cluster.rollout_workers=30"], "cluster.rollout_workers", 30, "start fewer"),
    ],
)
def test_more_memory_than_there_is(
    configure: Configure, overrides: list[str], field: str, value: object, fix: str
) -> None:
    problems = plan_run(configure(*overrides), SMALL).problems
    problem = next(found for found in problems if "this machine has 3.0 GB" in found.fix)

    assert (problem.field, problem.value) == (field, value)
    assert fix in problem.fix


def test_checkpoints_in_memory_for_which_there_is_no_room(configure: Configure, tmp_path: Path) -> None:
    kept = configure("checkpointing.memory_period=5", f"checkpointing.memory_dir={tmp_path}")
    free = shutil.disk_usage(tmp_path).free
    large = ProcessMemory("policy", 2, checkpoints_in_memory=free)
    roomy = replace(ROOMY, memory_bytes=10**18)

    assert list(memory_problems(kept, [replace(large, checkpoints_in_memory=1000)], roomy)) == []
    (problem,) = memory_problems(kept, [large], roomy)
    assert (problem.field, problem.value) == ("checkpointing.memory_period", 5)
    assert f"GB in {tmp_path}, which has" in problem.fix
    missing = configure("checkpointing.memory_period=5", "checkpointing.memory_dir=/there/is/none")
    (problem,) = memory_problems(missing, [large], roomy)
    assert (problem.field, problem.value) == ("checkpointing.memory_dir", "/there/is/none")


def test_buckets_larger_than_there_is_room_for(configure: Configure) -> None:
    process = ProcessMemory("policy", 1, weights=4 * 10**9, staging=8 * 10**9)

    (problem,) = memory_problems(configure("generation.bucket_megabytes=100000"), [process], SMALL)

    assert (problem.field, problem.value) == ("generation.bucket_megabytes", 100000)


def test_buckets_are_no_larger_than_what_they_carry(configure: Configure) -> None:
    assert plan_run(configure("generation.bucket_megabytes=100000"), ROOMY).problems == ()


@pytest.mark.parametrize("field", ["generation.threads", "cluster.policy_threads"])
def test_more_threads_than_cores(configure: Configure, field: str) -> None:
    problem = only_problem(configure, f"{field}=4000")

    assert (problem.field, problem.value) == (field, 4000)
    assert problem.fix == "this machine has 8 cores: take no more than that, or leave it out"
    assert plan_run(configure(f"{field}=8"), ROOMY).problems == ()


def test_another_machines_memory_is_not_known(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")

    assert plan_run(configure("generation.replicas=8", "generation.threads=8"), SMALL).problems == ()


def test_gpus_are_compared_one_process_each(configure: Configure) -> None:
    gpu_run = [
        "cluster.gpus_per_node=2",
        "policy.micro_batch_tokens=100000",
        "policy.max_sequence_length=2000",
    ]
    tiny_gpu = Machine(2, 10**11, 10**9, (Gpu("Tiny 1000", 1_000_000_000),))

    problem = only_problem(configure, *gpu_run, machine=tiny_gpu)

    assert "a policy process needs about" in problem.fix
    assert "the Tiny 1000 has 1.0 GB" in problem.fix
    assert (problem.field, problem.value) == ("policy.micro_batch_tokens", 100000)


def test_a_gpu_that_engines_share_holds_both_in_a_refit(configure: Configure) -> None:
    shared = configure(
        "generation.backend=vllm", "generation.colocated=true", "cluster.gpus_per_node=1",
        "policy.offload={weights: true, optimizer: true}",
    )  # fmt: skip
    shape = load_shape(shared.policy.model_path)
    of = {process.group: process for process in estimate_memory(shared, shape, True)}
    policy, engine = of["policy"], of["generation"]
    temporary = policy.activations + policy.logits + policy.head_gradient
    kept = policy.on_device - temporary + engine.on_device - engine.logits
    for short, fields in ((0, []), (1, ["generation.colocated"])):
        machine = Machine(2, 10**11, 10**9, (Gpu("Tiny 1000", kept - short),))
        found = [v for v in plan_run(shared, machine).problems if v.field != "generation.backend"]
        assert [problem.field for problem in found] == fields


def test_what_is_on_the_host_is_no_reason_for_a_gpu_that_is_too_small(configure: Configure) -> None:
    process = ProcessMemory("policy", 1, weights=2 * 10**9, optimizer_on_host=12 * 10**9)
    tiny_gpu = replace(SMALL, gpus=(Gpu("Tiny 1000", 10**9),))

    (on_cpu,) = memory_problems(configure(), [process], SMALL)
    (on_gpu,) = memory_problems(configure("cluster.gpus_per_node=2"), [process], tiny_gpu)

    assert "12.0 GB of that for the optimizer on host of the policy processes" in on_cpu.fix
    assert "2.0 GB of that for the weights, and the Tiny 1000 has 1.0 GB" in on_gpu.fix


def test_a_part_takes_no_more_than_the_process_whose_part_it_is(configure: Configure) -> None:
    """The process of a GPU is one of several."""
    process = ProcessMemory("policy", 8, weights=3 * 10**9, optimizer=20 * 10**9)
    gpu = replace(SMALL, gpus=(Gpu("Tiny 1000", 10**9),))

    (problem,) = memory_problems(configure("cluster.gpus_per_node=8"), [process], gpu)

    need = "a policy process needs about 23.0 GB, 20.0 GB of that for the optimizer"
    assert problem.fix.startswith(f"{need}, and the Tiny 1000 has 1.0 GB; ")


def test_a_machine_without_gpus_does_not_judge_a_run_on_gpus(configure: Configure) -> None:
    assert plan_run(configure("cluster.gpus_per_node=2"), SMALL).problems == ()


def test_an_evaluation_needs_no_layout(configure: Configure) -> None:
    plan = plan_run(configure("policy.layout.tensor_parallel_size=3"), ROOMY, training=False)

    assert plan.problems == ()
    assert [process.group for process in plan.processes] == ["driver", "generation", "rollout"]


def test_an_evaluation_by_the_policy_itself_needs_a_layout(configure: Configure) -> None:
    experiment = configure("policy.layout.tensor_parallel_size=3", "generation.backend=megatron")

    plan = plan_run(experiment, ROOMY, training=False)

    assert {problem.field for problem in plan.problems} == {"policy.layout.tensor_parallel_size"}


def test_tensorrt_llm_must_be_installed_where_it_samples(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = configure("generation.backend=trtllm", "cluster.gpus_per_node=2")
    assert "generation.backend" in {problem.field for problem in plan_run(experiment, ROOMY).problems}

    monkeypatch.setenv("RAY_ADDRESS", "elsewhere:6379")
    assert "generation.backend" not in {problem.field for problem in plan_run(experiment, ROOMY).problems}


@pytest.mark.parametrize(
    ("override", "field"),
    [
        (
            "generation={backend: openai, base_url: 'http://h/v1', model: m, api_key_env: A_KEY}",
            "api_key_env",
        ),
        ("generation.endpoint={api_key_env: A_KEY}", "endpoint.api_key_env"),
    ],
)
def test_a_key_that_is_named_must_be_there(
    configure: Configure, monkeypatch: pytest.MonkeyPatch, override: str, field: str
) -> None:
    monkeypatch.delenv("A_KEY", raising=False)
    experiment = configure(override)
    (found,) = file_problems(experiment)
    assert (found.field, found.value) == (f"generation.{field}", "A_KEY")
    monkeypatch.setenv("A_KEY", "secret")
    assert not list(file_problems(experiment))
    monkeypatch.delenv("A_KEY")
    monkeypatch.setenv("RAY_ADDRESS", "elsewhere:6379")  # whose processes have variables of their own
    assert not list(file_problems(experiment))


def test_the_keys_of_judges_and_of_teachers_must_be_there(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("A_KEY", raising=False)
    judge = "{kind: judge, url: 'http://h/v1', model: m, prompt: '{completion}', api_key_env: A_KEY}"
    experiment = configure(
        f"rewards=[{judge}]",
        "teachers={main: {kind: endpoint, base_url: 'http://h/v1', model: m, api_key_env: A_KEY}}",
        "algorithm.name=on_policy_distillation",
    )

    found = [problem.field for problem in file_problems(experiment)]
    assert found == ["teachers.main.api_key_env", "rewards.0.api_key_env"]
    # An evaluation starts no teacher.
    found = [problem.field for problem in file_problems(experiment, training=False)]
    assert found == ["rewards.0.api_key_env"]

    monkeypatch.setenv("A_KEY", "secret")
    assert not list(file_problems(experiment))


@pytest.mark.parametrize(
    ("env", "field"),
    [
        ("{name: user_simulator, url: 'http://h/v1', model: m, api_key_env: A_KEY}", "env"),
        (
            "{name: service, placement: {name: server, url: 'http://h/v1', api_key_env: A_KEY}}",
            "env.placement",
        ),
    ],
)
def test_the_keys_of_environments_must_be_there(
    configure: Configure, monkeypatch: pytest.MonkeyPatch, env: str, field: str
) -> None:
    monkeypatch.delenv("A_KEY", raising=False)
    experiment = configure(f"env={env}", "data.chat=true")
    found = [problem.field for problem in file_problems(experiment)]
    assert f"{field}.api_key_env" in found
    monkeypatch.setenv("A_KEY", "secret")
    assert f"{field}.api_key_env" not in [problem.field for problem in file_problems(experiment)]


def test_nixl_must_be_installed(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    has = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "nixl" else has(name))
    problem = only_problem(configure, "generation.transport=nixl")
    assert (problem.field, problem.value) == ("generation.transport", "nixl")
    assert "pip install 'nemorl[nixl]'" in problem.fix


def test_tensorboard_must_be_installed(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    problem = only_problem(configure, "logger.trackers=[tensorboard]")

    assert (problem.field, problem.value) == ("logger.trackers", "tensorboard")
    assert "pip install 'nemorl[trackers]'" in problem.fix


@pytest.mark.parametrize(
    ("url", "fix"),
    [
        ("s3://bucket/run", "pip install 'nemorl[s3]'"),
        ("dropbox://run", "its package is not installed"),
        ("s4://bucket/run", "fsspec knows no protocol 's4'"),
    ],
)
def test_a_store_needs_its_package(
    configure: Configure, monkeypatch: pytest.MonkeyPatch, url: str, fix: str
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)  # as if it were not installed
    problem = only_problem(configure, "generation.transport=files", f"generation.files_url={url}")
    assert (problem.field, problem.value) == ("generation.files_url", url)
    assert fix in problem.fix


@pytest.mark.parametrize("url", ["weights", "/mnt/shared/weights", "memory://weights"])
def test_versions_are_written_to_folders_and_stores(configure: Configure, url: str) -> None:
    given = ("generation.delta=true", "generation.precision=bfloat16", "generation.full_version_every=5")
    experiment = configure("generation.transport=files", f"generation.files_url={url}", *given)
    assert list(file_problems(experiment)) == []


@pytest.mark.parametrize(
    ("dataset", "field", "fix"),
    [
        ("task: chain_sum, options: {max_terms: abc}", "options", "ChainSumConfig"),
        ("task: chain_sum, options: {max_termz: 3}", "options", "unexpected keyword argument 'max_termz'"),
        (
            "task: chain_sum, options: {min_terms: 5, max_terms: 2}",
            "options",
            "max_terms must be >= min_terms",
        ),
        ("task: chain_some", "task", "did you mean chain_sum?"),
    ],
)
@pytest.mark.parametrize("section", ["train", "validation"])
def test_reasoning_gym_accepts_its_options(
    configure: Configure, section: str, dataset: str, field: str, fix: str
) -> None:
    gym = f"data.{section}={{name: reasoning_gym, {dataset}}}"
    problem = only_problem(configure, gym)
    assert problem.field == f"data.{section}.{field}"
    assert fix in problem.fix


def test_reasoning_gym_is_not_asked_for_another_machine(configure: Configure) -> None:
    gym = "data.train={name: reasoning_gym, task: chain_sum, options: {max_terms: abc}}"
    assert list(file_problems(configure(gym), packages=False)) == []
