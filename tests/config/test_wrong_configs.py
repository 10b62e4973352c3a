"""What users get wrong: each refusal names the field, the value and the fix."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from nemorl.config.checks import samples_can_be_learned_from
from nemorl.config.data import DataConfig
from nemorl.config.generation import (
    GenerationBase,
    MegatronGenerationConfig,
    OpenAIGenerationConfig,
    SamplingConfig,
    TorchGenerationConfig,
    TrtllmGenerationConfig,
    VllmGenerationConfig,
    VllmServerGenerationConfig,
)
from nemorl.config.load import examine, load_experiment
from nemorl.errors import ABSENT, Problem
from tests.config.experiments import GRPO, problems_of, refuses, write

SFT = ["algorithm.name=sft", "algorithm.num_steps=5", "algorithm.batch_size=8"]
CHAT = ["data.chat=true"]
MULTIPLY = "tests.environments.test_tools:multiply"
JSONL = ["data.train={name: jsonl, path: tasks.jsonl, answer_key: null}", "data.validation=null"]
PUZZLES = [
    "env.name=reasoning_gym",
    "data.train={name: reasoning_gym, task: chain_sum, size: 100}",
    "data.validation={name: reasoning_gym, task: chain_sum, size: 20, seed: 1000}",
]
GAMES = [
    "env={name: guess_number, move_tag: null}",
    "data.train={name: seeds, size: 100}",
    "data.validation={name: seeds, size: 20, seed: 100}",
]
DECAY = "policy.schedule={name: cosine, decay_steps: 100, warmup_steps: 10}"
VALIDATION = "algorithm.validation."
SERVER = "http://127.0.0.1:8000"
JUDGE = "{kind: judge, url: 'http://127.0.0.1:9/v1', model: m, prompt: 'Rate {completion}'"

# overrides that spoil the experiment, the field that is named, its value, a part of the fix
TYPES: dict[str, tuple[list[str], str, Any, str]] = {
    "a field misspelled": (
        ["policy.precison=float32"],
        "policy.precison",
        "float32",
        "did you mean `precision`?",
    ),
    "an unknown matrix": (
        ["policy.lora={rank: 4, alpha: 8, targets: [q_proj, qproj]}"],
        "policy.lora.targets.1",
        "qproj",
        "did you mean `q_proj`? expected one of `q_proj`, `k_proj`, `v_proj`, `o_proj`,",
    ),
    "a field in the wrong section": (
        ["policy.lr=1e-5"],
        "policy.lr",
        1e-5,
        "`policy.optimizer.lr`?",
    ),
    "a field nobody knows": (
        ["logger.zzz=1"],
        "logger.zzz",
        1,
        "the fields here are `console`, `prometheus`, `samples_per_step`, `trackers`, `trajectories`",
    ),
    "a step to profile that the run has not": (
        ["policy.profile={step_numbers: [1, 1000000]}"],
        "policy.profile.step_numbers",
        1000000,
        "the steps are 1 to",
    ),
    "a rank to profile that the layout has not": (
        ["policy.profile={step_numbers: [1], ranks: [64]}"],
        "policy.profile.ranks",
        64,
        "policy.layout has the ranks 0 to",
    ),
    "a section nobody knows": (["polcy.seed=1"], "polcy", {"seed": 1}, "did you mean `policy`?"),
    "a key of another algorithm": (
        [*SFT, "algorithm.num_minibatches=1"],
        "algorithm.num_minibatches",
        1,
        "remove it, or change algorithm.name",
    ),
    "a key of several other back ends": (
        ["generation={backend: trtllm, max_kv_tokens: 9}", "cluster.gpus_per_node=4"],
        "generation.max_kv_tokens",
        9,
        "belongs to `torch`, `megatron`, and generation.backend is `trtllm`",
    ),
    "a choice that all back ends have": (
        ["generation.transport=gloop"],
        "generation.transport",
        "gloop",
        "did you mean `gloo`? expected one of `auto`, `shared_memory`, `cuda_ipc`, `gloo`, `nccl`, `nixl`,",
    ),
    "an algorithm misspelled": (["algorithm.name=grppo"], "algorithm.name", "grppo", "did you mean `grpo`?"),
    "an algorithm nobody knows": (
        ["algorithm.name=zzz"],
        "algorithm.name",
        "zzz",
        "unknown value",
    ),
    "a schedule misspelled": (
        ["policy.schedule.name=cosin"],
        "policy.schedule.name",
        "cosin",
        "mean `cosine`?",
    ),
    "a choice misspelled": (
        ["algorithm.loss.aggregation=token_mean"],
        "algorithm.loss.aggregation",
        "token_mean",
        "did you mean `token-mean`?",
    ),
    "a choice of another library": (
        ["policy.precision=fp8"],
        "policy.precision",
        "fp8",
        "unknown value; expected one of `float32`, `bfloat16`",
    ),
    "a text for a number": (
        ["algorithm.num_steps=ten"],
        "algorithm.num_steps",
        "ten",
        "expected an integer: Steps of the run.",
    ),
    "a fraction of a step": (
        ["algorithm.num_steps=1.5"],
        "algorithm.num_steps",
        1.5,
        "expected an integer: Steps of the run.",
    ),
    "no steps": (
        ["algorithm.num_steps=0"],
        "algorithm.num_steps",
        0,
        "expected a value of at least 1: Steps of the run.",
    ),
    "a negative rate": (["policy.optimizer.lr=-1e-6"], "policy.optimizer.lr", -1e-6, "a value more than 0"),
    "an infinite rate": (
        ["policy.optimizer.lr=.inf"],
        "policy.optimizer.lr",
        float("inf"),
        "a finite number",
    ),
    "a mode of more than 1": (
        ["generation.sampling.top_p=1.2"],
        "generation.sampling.top_p",
        1.2,
        "expected a value of at most 1: Keep the fewest most likely tokens whose probabilities sum",
    ),
    "a number for a switch": (
        ["data.shuffle=7"],
        "data.shuffle",
        7,
        "expected true or false: Draw the training tasks in an order that depends on the seed and",
    ),
    "validation of another algorithm": (
        [VALIDATION + "generate=true"],
        "algorithm.validation.generate",
        True,
        "the fields here are `at_end`, `at_start`, `cons_at_k`, `num_generations_per_prompt`,",
    ),
    "a number for a text": (
        ["data.system_prompt=5"],
        "data.system_prompt",
        5,
        "expected a string: Put before each prompt as a system message.",
    ),
    "one number for a list": (
        ["algorithm.validation.pass_at_k=4"],
        "algorithm.validation.pass_at_k",
        4,
        "expected a list, such as `[1, 2]`: The k of pass@k (Chen et al. 2021, unbiased)",
    ),
    "null for an engine": (
        ["generation=null"],
        "generation",
        None,
        "if nothing is sampled, no engine is started: The engine that samples.",
    ),
    "null for a validation": (
        ["algorithm.validation=null"],
        "algorithm.validation",
        None,
        "it is off with `period: null, at_start: false, at_end: false`, its defaults: Measuring",
    ),
    "null for a section that must be": (["policy=null"], "policy", None, "expected a section with fields"),
    "a value for a section": (["policy.layout=2"], "policy.layout", 2, "expected a section with fields"),
    "an empty stop string": (
        ["generation.stop_strings=['']"],
        "generation.stop_strings.0",
        "",
        "expected a string with a length of at least 1: Strings that end a turn",
    ),
    "a required field left out": (
        ["data.train={name: jsonl}"],
        "data.train.path",
        ABSENT,
        "this field is required: A file with one JSON object per line, a Parquet, Arrow or text file",
    ),
    "a loss misspelled": (
        ["algorithm.loss.name=gpso"],
        "algorithm.loss.name",
        "gpso",
        "did you mean `gspo`?",
    ),
    "a setting of another loss": (
        ["algorithm.loss={name: reinforce, clip_low: 0.1}"],
        "algorithm.loss.clip_low",
        0.1,
        "this field belongs to `clip`, `gspo`, `gspo_token`, `gmpo` and others, and",
    ),
    "the former setting of vLLM's cache": (
        ["generation={backend: vllm, recompute_kv_cache: false}"],
        "generation.recompute_kv_cache",
        False,
        "unknown field; set `on_update` to restart (it recomputes the KV cache) or continue (it keeps it)",
    ),
    "the former setting of TensorRT-LLM's updates": (
        ["generation={backend: trtllm, in_flight_updates: true}"],
        "generation.in_flight_updates",
        True,
        "unknown field; set `on_update` to finish (nothing is in flight), restart or continue",
    ),
    "a correction nobody knows": (
        ["algorithm.correction.name=ppo"],
        "algorithm.correction.name",
        "ppo",
        "unknown value; expected one of `none`, `tis`, `mis`, `icepop`",
    ),
    "a function without its module": (
        ["algorithm.loss={name: custom, function: my_loss}"],
        "algorithm.loss.function",
        "my_loss",
        "package.module:function",
    ),
}

RELATIONS: dict[str, tuple[list[str], str, Any, str]] = {
    "sequences of the policy's own processes over an update": (
        ["generation={backend: megatron, on_update: finish}"],
        "generation.on_update",
        "finish",
        "the policy's processes sample, and all sequences have ended when it trains; remove it",
    ),
    "updates of a server that receives no weights": (
        ["generation={backend: openai, base_url: 'http://127.0.0.1:1/v1', model: m, on_update: restart}"],
        "generation.on_update",
        "restart",
        "the server receives no weights from the run; remove it",
    ),
    "more groups than dynamic sampling allows": (
        [
            "algorithm.oversampling=2.5",
            "algorithm.filters={drop_equal_rewards: true, refill: {max_batches: 2}}",
        ],
        "algorithm.oversampling",
        2.5,
        "a step samples at most algorithm.filters.refill.max_batches, 2, times num_prompts_per_step",
    ),
    "concurrency by the queue of a server": (
        ["generation={backend: openai, base_url: 'http://host/v1', model: m, adaptive_concurrency: true}"],
        "generation.adaptive_concurrency",
        True,
        "the server does not report which requests wait",
    ),
    "concurrency of the policy's own processes": (
        ["generation={backend: megatron, concurrency: 8}"],
        "generation.concurrency",
        8,
        "generation.max_batch_size is what they sample at a time; remove it",
    ),
    "a deadline of groups after that of the run": (
        ["algorithm.group_seconds=1800"],
        "algorithm.group_seconds",
        1800,
        "the run ends after cluster.deadlines.generation, 1800, without a finished group",
    ),
    "a wait for a node where none is waited for": (
        ["cluster={on_lost_node: fail, deadlines: {lost_node: 60}}"],
        "cluster.deadlines.lost_node",
        60.0,
        "cluster.on_lost_node is fail, so nothing waits for a node",
    ),
    "fewer ranks without restarts": (
        ["cluster={on_lost_node: shrink, max_model_restarts: 0}"],
        "cluster.on_lost_node",
        "shrink",
        "cluster.max_model_restarts is 0, so no model is restarted",
    ),
    "the KV cache of the policy's own processes while they train": (
        ["algorithm.max_staleness=1", "generation={backend: megatron, on_update: continue}"],
        "generation.on_update",
        "continue",
        "the policy's devices have no KV cache while it trains",
    ),
    "the KV cache of engines that sleep": (
        ["algorithm.max_staleness=1", "generation={backend: vllm, colocated: true, on_update: finish}"],
        "generation.on_update",
        "finish",
        "algorithm.max_staleness lets sequences continue after that; set it to restart",
    ),
    "a deadline of groups that wait for the policy": (
        ["algorithm={max_staleness: 1, group_seconds: 60}", "generation={backend: megatron}"],
        "algorithm.group_seconds",
        60,
        "groups wait while the policy trains on the devices that sample, and this time would count",
    ),
    "minibatches that do not divide": (
        ["algorithm.num_minibatches=3"],
        "algorithm.num_minibatches",
        3,
        "it must divide the 32 trajectories (4 prompts x 8 generations) of a step",
    ),
    "too many copies": (
        ["policy.layout.data_parallel_size=5"],
        "policy.layout.data_parallel_size",
        5,
        "it must divide the trajectories of an optimizer step",
    ),
    "copies that do not divide a minibatch": (
        ["policy.layout.data_parallel_size=32", "algorithm.num_minibatches=4"],
        "policy.layout.data_parallel_size",
        32,
        "in 4 minibatches of 8",
    ),
    "copies that do not divide the SFT batch": (
        [*SFT, "policy.layout.data_parallel_size=3"],
        "algorithm.batch_size",
        8,
        "policy.layout.data_parallel_size, 3, must divide it",
    ),
    "a group of one": (
        ["algorithm.num_generations_per_prompt=1"],
        "algorithm.num_generations_per_prompt",
        1,
        "set it to 2 or more, or use `reinforce`",
    ),
    "a norm without its length": (
        ["algorithm.loss.aggregation=seq-mean-token-sum-norm"],
        "algorithm.loss.aggregation_length",
        ABSENT,
        "`seq-mean-token-sum-norm` divides by this length",
    ),
    "a length without its norm": (
        ["algorithm.loss.aggregation_length=8"],
        "algorithm.loss.aggregation_length",
        8,
        "`token-mean` does not use it; remove it, or use `seq-mean-token-sum-norm`",
    ),
    "the norm in SFT": (
        [*SFT, "algorithm.aggregation=seq-mean-token-sum-norm"],
        "algorithm.aggregation",
        "seq-mean-token-sum-norm",
        "`sft` has no fixed length to divide by; use `seq-mean-token-mean` or `token-mean`",
    ),
    "a turn as long as the sequence": (
        ["generation.max_new_tokens=64"],
        "generation.max_new_tokens",
        64,
        "max_new_tokens (64) fills policy.max_sequence_length (64), so no prompt fits",
    ),
    "a cache too small": (
        ["generation.max_kv_tokens=63"],
        "generation.max_kv_tokens",
        63,
        "must hold a complete conversation; set it to at least policy.max_sequence_length (64)",
    ),
    "a micro-batch too small": (
        ["policy.micro_batch_tokens=32"],
        "policy.micro_batch_tokens",
        32,
        "must hold a complete conversation; set it to at least policy.max_sequence_length, 64",
    ),
    "changes in float32": (
        ["generation.delta=true"],
        "generation.delta",
        True,
        "set it to false, or precision to bfloat16",
    ),
    "servers that receive weights by another transport": (
        [f"generation={{backend: vllm_server, base_urls: ['{SERVER}'], transport: gloo}}"],
        "generation.transport",
        "gloo",
        "files",
    ),
    "a server with a path": (
        [f"generation={{backend: vllm_server, base_urls: ['{SERVER}', '{SERVER}/v1'], replicas: 2}}"],
        "generation.base_urls.1",
        f"{SERVER}/v1",
        "paths are appended to it; end it with the port",
    ),
    "a server without protocol": (
        ["generation={backend: vllm_server, base_urls: ['localhost:8000']}"],
        "generation.base_urls.0",
        "localhost:8000",
        "expected an address such as http://127.0.0.1:8000",
    ),
    "more servers than replicas": (
        [f"generation={{backend: vllm_server, base_urls: ['{SERVER}', '{SERVER}']}}"],
        "generation.replicas",
        1,
        "base_urls has 2 addresses; set it to that number",
    ),
    "threads of a server that others started": (
        [f"generation={{backend: vllm_server, base_urls: ['{SERVER}'], threads: 2}}"],
        "generation.threads",
        2,
        "the servers have settings of their own; remove it",
    ),
    "a folder of versions for another transport": (
        ["generation.files_url=s3://bucket/run"],
        "generation.files_url",
        "s3://bucket/run",
        "only generation.transport: files writes versions; remove it, or set that",
    ),
    "full versions without changes": (
        ["generation.transport=files", "generation.full_version_every=3"],
        "generation.full_version_every",
        3,
        "without generation.delta each version has all weights; remove it, or set that to true",
    ),
    "credentials in a URL": (
        ["generation.transport=files", "generation.files_url=ftp://me:secret@host/run"],
        "generation.files_url",
        "ftp://...@host/run",
        "give credentials as the store's package reads them",
    ),
    "NCCL without GPUs": (
        ["generation.transport=nccl"],
        "generation.transport",
        "nccl",
        "set this to auto or gloo",
    ),
    "CUDA IPC without GPUs": (
        ["generation.transport=cuda_ipc"],
        "generation.transport",
        "cuda_ipc",
        "set this to auto or shared_memory",
    ),
    "greedy training": (
        ["generation.sampling.temperature=0"],
        "generation.sampling.temperature",
        0.0,
        "set it to more than 0 (for validation 0 is allowed)",
    ),
    "min-p next to top-p in training": (
        ["generation.sampling={min_p: 0.1, top_p: 0.9}"],
        "generation.sampling.min_p",
        0.1,
        "remove one of the two",
    ),
    "greedy samples of one task": (
        [VALIDATION + "sampling={temperature: 0}", VALIDATION + "num_generations_per_prompt=4"],
        "algorithm.validation.num_generations_per_prompt",
        4,
        "set it to 1, or raise the temperature",
    ),
    "a warm-up longer than the decay": (
        [DECAY, "policy.schedule.warmup_steps=100"],
        "policy.schedule.decay_steps",
        100,
        "it includes warmup_steps and stable_steps, 100 together; set it to more than that",
    ),
    "a decay that goes up": (
        [DECAY, "policy.schedule.min_lr=1e-3"],
        "policy.schedule.min_lr",
        1e-3,
        "the rate decays to this from policy.optimizer.lr, 1e-06",
    ),
    "a template without the prompt": (
        ["data.prompt_template=Think!"],
        "data.prompt_template",
        "Think!",
        "write `{prompt}` where it belongs",
    ),
    "a system prompt without chat": (
        ["data.system_prompt=Be brief."],
        "data.system_prompt",
        "Be brief.",
        "data.chat is false",
    ),
    "a chat template without chat": (
        ["policy.tokenizer.chat_template=chat.jinja"],
        "policy.tokenizer.chat_template",
        "chat.jinja",
        "data.chat is false",
    ),
    "arguments of a template without chat": (
        ["policy.tokenizer.template_arguments={enable_thinking: false}"],
        "policy.tokenizer.template_arguments",
        {"enable_thinking": False},
        "data.chat is false",
    ),
    "an argument that depends on the conversation": (
        [*CHAT, "policy.tokenizer.template_arguments={tools: []}"],
        "policy.tokenizer.template_arguments.tools",
        [],
        "rendered with a value of their own",
    ),
    "a limit of prompts beyond the sequence": (
        ["data.max_prompt_tokens=64", "policy.max_sequence_length=64"],
        "data.max_prompt_tokens",
        64,
        "policy.max_sequence_length is 64",
    ),
    "a limit of prompts without sampling": (
        [*SFT, "data.max_prompt_tokens=8", "algorithm.validation={generate: false}"],
        "data.max_prompt_tokens",
        8,
        "this run samples nothing",
    ),
    "a reward of truncated answers that changes nothing": (
        ["algorithm.truncated_reward={}"],
        "algorithm.truncated_reward.scale",
        None,
        "nothing changes without it",
    ),
    "two rewards of truncated answers": (
        ["algorithm.truncated_reward={scale: 0.5, value: -1}"],
        "algorithm.truncated_reward.value",
        -1.0,
        "scale is set too",
    ),
    "more sums than there are": (
        ["data.train.digits=1"],
        "data.train.size",
        1000,
        "it exceeds the 100 pairs of 1 digit; lower it, or raise digits",
    ),
    "an offset behind the last sum": (
        ["data.train.offset=400000"],
        "data.train.offset",
        400000,
        "size + offset = 401000 exceeds the 10000 pairs of 2 digits; lower one of the two, or raise digits",
    ),
    "SFT without answers": (
        [*SFT, *JSONL],
        "data.train.answer_key",
        None,
        "`sft` learns the answers; set it to the key that holds them",
    ),
    "a comparison without answers": (
        [*JSONL, "env.name=math"],
        "data.train.answer_key",
        None,
        "the environment `math` compares with the task's answer",
    ),
    "puzzles of another maker": (
        ["env.name=reasoning_gym", "data.validation=null"],
        "data.train.name",
        "arithmetic",
        "the environment `reasoning_gym` supports `reasoning_gym` datasets only; change one",
    ),
    "no reward at all": (
        ["rewards=[]"],
        "rewards",
        [],
        "the environment `single_turn` has no reward, so every reward would be 0",
    ),
    "rewards that count nothing": (
        ["rewards=[{function: exact_match, weight: 0}]"],
        "rewards.0.weight",
        0.0,
        "all weights are 0",
    ),
    "validation without a reward": (
        [*SFT, "rewards=[]", VALIDATION + "at_end=true"],
        "rewards",
        [],
        "every reward would be 0",
    ),
    "one reward twice": (
        ["rewards=[{function: exact_match}, {function: mine.sums:exact_match}]"],
        "rewards.1.function",
        "mine.sums:exact_match",
        "another reward has the name `exact_match`; remove one, or set another `name`",
    ),
    "a reward named like the environment's": (
        ["env.name=math", "rewards=[{function: mine:math}]"],
        "rewards.0.function",
        "mine:math",
        "another reward has the name `math`; remove one, or set another `name`",
    ),
    "a name of another reward": (
        ["rewards=[{function: exact_match}, {function: mine:close, name: exact_match}]"],
        "rewards.1.name",
        "exact_match",
        "another reward has the name `exact_match`; remove one, or set another `name`",
    ),
    "a reward called like the mean of all": (
        ["rewards=[{function: exact_match, name: mean}]"],
        "rewards.0.name",
        "mean",
        "the metric reward/mean is of all rewards together",
    ),
    "two judges without names": (
        [f"rewards=[{JUDGE}}}, {JUDGE}}}]"],
        "rewards.1.kind",
        "judge",
        "another reward has the name `judge`; remove one, or set another `name`",
    ),
    "a reward of a kind nobody knows": (
        ["rewards=[{kind: modle, url: x, model: m}]"],
        "rewards.0.kind",
        "modle",
        "did you mean `model`?",
    ),
    "a reward model's address without a scheme": (
        ["rewards=[{kind: model, url: '127.0.0.1:8000/v1', model: m}]"],
        "rewards.0.url",
        "127.0.0.1:8000/v1",
        "expected an address such as http://127.0.0.1:8000/v1",
    ),
    "a function with a server's field": (
        ["rewards=[{function: exact_match, url: 'http://a/v1'}]"],
        "rewards.0.url",
        "http://a/v1",
        "belongs to `model`, `judge`, and rewards.0.kind is `function`",
    ),
    "a judge of groups that is shown one answer": (
        [f"rewards=[{JUDGE}, ranks_groups: true}}]"],
        "rewards.0.prompt",
        "Rate {completion}",
        "ranks_groups is true, and {completions} is missing; add it",
    ),
    "too few GPUs for a reward model": (
        [
            "cluster.gpus_per_node=3",
            "rewards=[{kind: local_model, model_path: m, layout: {tensor_parallel_size: 2}}]",
        ],
        "cluster.gpus_per_node",
        3,
        "3 GPUs are too few for 1 policy process, 2 of auxiliary models and 1 engine",
    ),
    "a judge without a range": (
        [f"rewards=[{JUDGE}, min_score: 10}}]"],
        "rewards.0.max_score",
        10.0,
        "it is worth 1 and min_score, 10, is worth 0; set it to more than that",
    ),
    "a judge's pattern that is not used": (
        [f"rewards=[{JUDGE}, pattern: '(1)'}}]"],
        "rewards.0.pattern",
        "(1)",
        "parser is `json`, which does not use it; set that to regex, or remove this",
    ),
    "a judge's pattern without a number": (
        [f"rewards=[{JUDGE}, parser: regex, pattern: abc}}]"],
        "rewards.0.pattern",
        "abc",
        "the score is its first group, and it has none; put parentheses around the number",
    ),
    "a judge's pattern that is none": (
        [f"rewards=[{JUDGE}, parser: regex, pattern: '(a'}}]"],
        "rewards.0.pattern",
        "(a",
        "invalid regular expression (missing ), unterminated subpattern at position 0)",
    ),
    "a calculator in plain text": (["env.name=calculator"], "data.chat", False, "set data.chat to true"),
    "an environment behind no address": (
        ["env={name: math, placement: {name: server, url: nowhere}}"],
        "env.placement.url",
        "nowhere",
        "expected an address such as http://127.0.0.1:8000/v1",
    ),
    "an environment of a server without it": (
        ["env={name: service, weights: {solved: 1}}"],
        "env.placement.name",
        "worker",
        "only its server has this environment; set it to {name: server, url: …}",
    ),
    "an agent behind a server": (
        ["env={name: program, command: [python3], placement: {name: server, url: 'http://127.0.0.1:1/v1'}}"],
        "env.placement.name",
        "server",
        "call the model in their rollout worker; remove this",
    ),
    "an endpoint for agents without an agent": (
        ["env.endpoint_host=0.0.0.0"],
        "env.endpoint_host",
        "0.0.0.0",
        "episodes of `single_turn` do not call the model over HTTP; remove this",
    ),
    "an environment of tools without any": (
        ["env.name=tools", *CHAT],
        "env.tools",
        [],
        "there is no tool; set tools, mcp, python or retrieval",
    ),
    "a tool that cannot be found": (
        ["env={name: tools, tools: ['nowhere:search']}", *CHAT],
        "env.tools.0",
        "nowhere:search",
        "cannot import nowhere: ModuleNotFoundError: No module named 'nowhere'; put it in the current folder",
    ),
    "a tool that nothing describes": (
        ["env={name: tools, tools: ['tests.environments.test_tools:no_docstring']}", *CHAT],
        "env.tools.0",
        "tests.environments.test_tools:no_docstring",
        "describe the function and each parameter in its docstring",
    ),
    "a tool that is no path of a function": (
        [f"env={{name: tools, tools: [{MULTIPLY}, my_tools.search]}}", *CHAT],
        "env.tools.1",
        "my_tools.search",
        "invalid format: `package.module:function` of typed Python functions",
    ),
    "a tool in place of a list": (
        ["env={name: tools, tools: 'my_tools:search'}", *CHAT],
        "env.tools",
        "my_tools:search",
        "expected a list, such as `[1, 2]`",
    ),
    "a tool of an environment by task that is no function": (
        ["env={name: by_task, environments: {tools: {name: tools, tools: ['search']}}}", *CHAT],
        "env.environments.tools.tools.0",
        "search",
        "invalid format: `package.module:function` of typed Python functions",
    ),
    "two functions of one name": (
        [f"env={{name: tools, tools: [{MULTIPLY}, {MULTIPLY}]}}", *CHAT],
        "env.tools.1",
        MULTIPLY,
        "the tool of tools.0 is named `multiply`, too; rename or remove one of them",
    ),
    "a function named as a built-in tool": (
        ["env={name: tools, python: {}, tools: ['tests.environments.test_tools:python']}", *CHAT],
        "env.tools.0",
        "tests.environments.test_tools:python",
        "the tool of python is named `python`, too; rename or remove one of them",
    ),
    "an MCP server that is not installed": (
        ["env={name: tools, mcp: [{command: [no-such-server, --stdio]}]}", *CHAT],
        "env.mcp.0.command.0",
        "no-such-server",
        "no such program on this machine; correct the path, or install it on all nodes",
    ),
    "a call that takes longer than a step may": (
        ["env={name: tools, python: {wall_seconds: 20}, call_seconds: 290}", *CHAT],
        "env.call_seconds",
        290.0,
        "calls may take 310 s, with python.wall_seconds where there is such, and cluster.deadlines",
    ),
    "an answer to compare with that tasks lack": (
        [*JSONL, "env={name: tools, python: {}, answer: equal}", *CHAT],
        "data.train.answer_key",
        None,
        "the environment `tools` compares with the task's answer",
    ),
    "a weight of tools without a reward": (
        ["env={name: tools, python: {}, weight: 2}", *CHAT],
        "env.weight",
        2.0,
        "answer is `none`, which gives no reward; set that to equal, or remove this",
    ),
    "documents that do not exist": (
        ["env={name: tools, retrieval: {path: nowhere.jsonl}}", *CHAT],
        "env.retrieval.path",
        "nowhere.jsonl",
        "there is no such file",
    ),
    "documents in another format": (
        ["env={name: tools, retrieval: {path: pyproject.toml}}", *CHAT],
        "env.retrieval.path",
        "pyproject.toml",
        "pyproject.toml, line 1: not JSON: ",
    ),
    "an MCP server without an address": (
        ["env={name: tools, mcp: [{}]}", *CHAT],
        "env.mcp.0.command",
        [],
        "set either command or url",
    ),
    "validation on nothing": (
        ["data.validation=null", VALIDATION + "period=2"],
        "data.validation",
        ABSENT,
        "algorithm.validation needs tasks; set a dataset, or remove period, at_start and at_end",
    ),
    "more prompts than tasks": (
        [VALIDATION + "num_prompts=101"],
        "algorithm.validation.num_prompts",
        101,
        "data.validation has 100 tasks",
    ),
    "pass@k of fewer samples": (
        [VALIDATION + "pass_at_k=[1, 8]", VALIDATION + "num_generations_per_prompt=4"],
        "algorithm.validation.pass_at_k",
        [1, 8],
        "pass@k requires 8 samples of each task, and there are 4",
    ),
    "a best checkpoint that is never measured": (
        ["checkpointing.metric=validation/reward"],
        "checkpointing.metric",
        "validation/reward",
        "only validation measures it; set algorithm.validation.period",
    ),
    "a misspelled best checkpoint that is never measured": (
        ["checkpointing.metric=validation/reword"],
        "checkpointing.metric",
        "validation/reword",
        "did you mean `validation/reward`? only validation measures it; set algorithm.validation.period",
    ),
    "a best checkpoint that is never kept": (
        ["checkpointing.metric=reward/mean", "checkpointing.enabled=false"],
        "checkpointing.metric",
        "reward/mean",
        "checkpointing.enabled is false",
    ),
    "a best checkpoint by a figure misspelled": (
        ["checkpointing.metric=reward/meen"],
        "checkpointing.metric",
        "reward/meen",
        "unknown metric of this run; did you mean `reward/mean`?",
    ),
    "a best checkpoint by a figure of validation misspelled": (
        ["checkpointing.metric=validation/acuracy", VALIDATION + "period=2"],
        "checkpointing.metric",
        "validation/acuracy",
        "did you mean `validation/accuracy`?",
    ),
    "a best checkpoint by a figure of another algorithm": (
        [*SFT, "checkpointing.metric=ratio/mean"],
        "checkpointing.metric",
        "ratio/mean",
        "loss/balance, loss/router_z, loss/sft, lr, mfu/training, models/restarts, mtp/accepted, ",
    ),
    "a best checkpoint by a divergence that is not computed": (
        ["checkpointing.metric=kl/reference"],
        "checkpointing.metric",
        "kl/reference",
        "unknown metric of this run",
    ),
    "a bounded stop without a copy of the state": (
        ["checkpointing.stop_seconds=60", "checkpointing.asynchronous=false"],
        "checkpointing.stop_seconds",
        60.0,
        "set checkpointing.asynchronous to true, or this to null",
    ),
    "better than what": (
        ["checkpointing.higher_is_better=false"],
        "checkpointing.higher_is_better",
        False,
        "checkpointing.metric is not given; set it, or remove this",
    ),
    "a period of no checkpoints": (
        ["checkpointing.enabled=false", "checkpointing.period=5"],
        "checkpointing.period",
        5,
        "checkpointing.enabled is false",
    ),
    "a number of no checkpoints": (
        ["checkpointing.enabled=false", "checkpointing.keep=5"],
        "checkpointing.keep",
        5,
        "checkpointing.enabled is false",
    ),
    "an estimator of nothing": (
        ["algorithm.kl.estimator=k1"],
        "algorithm.kl.estimator",
        "k1",
        "algorithm.kl.coefficient is 0",
    ),
    "k1 in the loss": (
        ["algorithm.kl={coefficient: 0.1, estimator: k1}"],
        "algorithm.kl.estimator",
        "k1",
        "in the loss the gradient of k1 is 0 in expectation",
    ),
    "k3 in the reward": (
        ["algorithm.kl={coefficient: 0.1, placement: reward}"],
        "algorithm.kl.estimator",
        "k3",
        "in the reward only k1 has a gradient to the reference",
    ),
    "the gradient of k2 for k2": (
        ["algorithm.kl={coefficient: 0.1, estimator: k2, straight_through: true}"],
        "algorithm.kl.straight_through",
        True,
        "k2 has this gradient already",
    ),
    "a gradient of a reward": (
        ["algorithm.kl={coefficient: 0.1, estimator: k1, placement: reward, straight_through: true}"],
        "algorithm.kl.straight_through",
        True,
        "a reward has no gradient",
    ),
    "a clamp of no divergence": (
        ["algorithm.kl.max_value=10"],
        "algorithm.kl.max_value",
        10.0,
        "algorithm.kl.coefficient is 0",
    ),
    "covariances from high to low": (
        ["algorithm.loss={name: clip_cov, covariance_low: 5, covariance_high: 1}"],
        "algorithm.loss.covariance_low",
        5.0,
        "less than algorithm.loss.covariance_high, 1",
    ),
    "tokens held near themselves": (
        ["algorithm.loss={name: kl_cov}"],
        "algorithm.num_minibatches",
        1,
        "`kl_cov` has no gradient in the first update of a step; set it to 2 or more",
    ),
    "several advantages in a sequence that has one ratio": (
        [
            *CHAT,
            "env={name: calculator, call_weight: 0.1}",
            "rewards=[]",
            "algorithm.advantage={name: turn}",
            "algorithm.loss={name: gmpo}",
        ],
        "algorithm.loss.name",
        "gmpo",
        "`turn` has several advantages in a sequence",
    ),
    "more of the entropy than it may count": (
        ["algorithm.entropy={name: adaptive, initial: 2}"],
        "algorithm.entropy.initial",
        2.0,
        "at most algorithm.entropy.max_coefficient, 1",
    ),
    "a truncation without room": (
        ["algorithm.correction={name: tis, low: 2, high: 2}"],
        "algorithm.correction.low",
        2.0,
        "less than algorithm.correction.high, 2",
    ),
    "a mask that leaves out what is seen alike": (
        ["algorithm.correction={name: mis, high: 0.5}"],
        "algorithm.correction.high",
        0.5,
        "at least 1",
    ),
    "bounds above what is seen alike": (
        ["algorithm.correction={name: icepop, low: 1.2, high: 5}"],
        "algorithm.correction.low",
        1.2,
        "at most 1",
    ),
    "a ratio weighed twice": (
        ["algorithm.correction={name: tis, form: bypass}"],
        "algorithm.correction.name",
        "tis",
        "in the bypass form the ratio of `clip` is relative to the engine, and weighs each token",
    ),
    "an engine that nothing is taken against": (
        ["algorithm.loss={name: reinforce}", "algorithm.correction.form=bypass"],
        "algorithm.correction.form",
        "bypass",
        "`reinforce` has no ratio",
    ),
    "a divisor that is known too late": (
        ["algorithm.correction={name: mis, form: bypass, divisor: kept}"],
        "algorithm.correction.divisor",
        "kept",
        "in the bypass form only the update shows what is left out",
    ),
    "a divisor of what nothing leaves out": (
        ["algorithm.correction={name: tis, divisor: kept}"],
        "algorithm.correction.divisor",
        "kept",
        "remove this, use `mis` or `icepop`, or set sequence_mask",
    ),
    "a part of the name of a field": (
        ["generation.url=http://127.0.0.1:8000/v1"],
        "generation.url",
        "http://127.0.0.1:8000/v1",
        "unknown field; did you mean `generation.base_url`, `generation.files_url`?",
    ),
    "none of the tokens": (
        ["generation.sampling.top_k=0"],
        "generation.sampling.top_k",
        0,
        "expected a value of at least 1: Keep the k most likely tokens; null keeps all.",
    ),
    "samples that are all the same": (
        ["generation.sampling.top_k=1"],
        "generation.sampling.top_k",
        1,
        "set it to more than 1, or remove it",
    ),
    "a mask that leaves nothing out": (
        ["algorithm.correction={name: tis, sequence_mask: {}}"],
        "algorithm.correction.sequence_mask",
        {},
        "no sequence is left out; set one of its bounds, or set this to null",
    ),
    "an epsilon that is added to nothing": (
        ["algorithm.advantage={normalize: false, epsilon: 1e-4}"],
        "algorithm.advantage.epsilon",
        1e-4,
        "algorithm.advantage.normalize is false",
    ),
    "weights saved without a checkpoint": (
        ["checkpointing.save_hf=true", "checkpointing.enabled=false"],
        "checkpointing.save_hf",
        True,
        "checkpointing.enabled is false, so no checkpoint is written; remove one of the two",
    ),
    "weights in checkpoints that are not written": (
        ["checkpointing.export_hf=true", "checkpointing.enabled=false"],
        "checkpointing.export_hf",
        True,
        "checkpointing.enabled is false, so no checkpoint is written",
    ),
    "a size of files that are not written": (
        ["checkpointing.max_shard_gigabytes=2"],
        "checkpointing.max_shard_gigabytes",
        2.0,
        "neither checkpointing.save_hf nor export_hf is true; set one, or remove this",
    ),
    "the same sums in validation": (
        ["data.validation.offset=900"],
        "data.validation.offset",
        900,
        "training uses tasks 0 to 999 of the same order; start at 1000",
    ),
    "another order of the same sums": (
        ["data.validation.seed=7"],
        "data.validation.seed",
        7,
        "use seed 0 and an offset",
    ),
    "the same puzzles in validation": (
        [*PUZZLES, "data.validation.seed=99"],
        "data.validation.seed",
        99,
        "training uses the tasks of seeds 0 to 99",
    ),
    "trajectories by another word": (
        ["logger.trajectories=some"],
        "logger.trajectories",
        "some",
        "expected `none`, `sampled`, `all` or an integer of at least 0",
    ),
    "fewer trajectories than none": (
        ["logger.trajectories=-1"],
        "logger.trajectories",
        -1,
        "expected `none`, `sampled`, `all` or an integer of at least 0",
    ),
    "trajectories of SFT": (
        [*SFT, "logger.trajectories=4"],
        "logger.trajectories",
        4,
        "algorithm.name is `sft`, which samples no trajectories",
    ),
    "the same games in validation": (
        [*GAMES, "data.validation.seed=99"],
        "data.validation.seed",
        99,
        "training uses the tasks of seeds 0 to 99; set it to 100 or more",
    ),
    "a game without numbers": (
        [*GAMES, "env.high=1"],
        "env.high",
        1,
        "low is 1, so there is nothing to guess",
    ),
    "a game with other tasks": (
        ["env={name: sliding_puzzle}", "data.validation=null"],
        "data.train.name",
        "arithmetic",
        "the environment `sliding_puzzle` supports `seeds` datasets only",
    ),
    "a word with a capital": (
        [*GAMES[1:], "env={name: wordle, words: [crane, Slate]}"],
        "env.words.1",
        "Slate",
        "lowercase letters only",
    ),
    "the same file in validation": (
        ["data.train={name: jsonl, path: a.jsonl}", "data.validation={name: jsonl, path: a.jsonl}"],
        "data.validation.path",
        "a.jsonl",
        "training reads the same file",
    ),
    "a policy that says numbers": (
        ["policy.head=scalar"],
        "policy.head",
        "scalar",
        "set it to lm",
    ),
    "idle interleaved stages": (
        [
            "policy.layout.pipeline_parallel_size=4",
            "policy.layout.virtual_pipeline_parallel_size=2",
            "algorithm.num_prompts_per_step=1",
            "algorithm.num_generations_per_prompt=2",
        ],
        "policy.layout.virtual_pipeline_parallel_size",
        2,
        "an optimizer step has 2 sequences for the 4 stages",
    ),
    "a judge of whichever node": (
        ["cluster.num_nodes=2", f"rewards=[{JUDGE}}}]"],
        "rewards.0.url",
        "http://127.0.0.1:9/v1",
        "cluster.num_nodes is 2, and on each node this address is that node",
    ),
    "nodes for nobody": (
        ["cluster.labels={critic: {nemorl.io/part: gpu}}"],
        "cluster.labels.critic",
        {"nemorl.io/part": "gpu"},
        "this run has no such group of workers; use one of policy, rollout, generation",
    ),
    "nodes for who lives with the policy": (
        [
            "algorithm={name: ppo, num_steps: 1, num_prompts_per_step: 8, num_generations_per_prompt: 1}",
            "critic.devices=policy",
            "cluster.topology={critic: ray.io/gpu-domain}",
        ],
        "cluster.topology.critic",
        "ray.io/gpu-domain",
        "it shares the policy's devices; name the nodes in cluster.topology.policy",
    ),
    "a domain of one node": (
        ["cluster.topology={policy: ray.io/node-id}"],
        "cluster.topology.policy",
        "ray.io/node-id",
        "set cluster.placement to STRICT_PACK instead",
    ),
    "too few GPUs": (
        ["cluster.gpus_per_node=4", "policy.layout.tensor_parallel_size=4"],
        "cluster.gpus_per_node",
        4,
        "4 GPUs are too few for 4 policy processes and 1 engine",
    ),
    "GPU kernels on a CPU": (
        ["policy.kernels=transformer_engine"],
        "policy.kernels",
        "transformer_engine",
        "it requires GPUs, and cluster.gpus_per_node is 0; set it to auto",
    ),
    "moments of fewer bits on a CPU": (
        ["policy.precision=bfloat16", "policy.optimizer.exp_avg_dtype=fp8"],
        "policy.optimizer.exp_avg_dtype",
        "fp8",
        "cluster.gpus_per_node is 0, and Transformer Engine's Adam, which takes this, requires GPUs",
    ),
    "weights of fewer bits than the policy's": (
        ["cluster.gpus_per_node=4", "policy.optimizer.main_params_dtype=float16"],
        "policy.optimizer.main_params_dtype",
        "float16",
        "policy.precision is float32, which has no use for it; set this to float32",
    ),
    "moments of fewer bits on the host": (
        [
            "cluster.gpus_per_node=4",
            "policy.precision=bfloat16",
            "policy.optimizer={on_host: true, exp_avg_sq_dtype: bfloat16}",
        ],
        "policy.optimizer.exp_avg_sq_dtype",
        "bfloat16",
        "policy.optimizer.on_host is true, and the Adam of the host takes float32 only",
    ),
    "activations that leave with weights in FP8": (
        [
            "cluster.gpus_per_node=4",
            "policy.precision=bfloat16",
            "policy.fp8={}",
            "policy.offload_activations.layers=2",
        ],
        "policy.offload_activations.layers",
        2,
        "with policy.fp8 layers also save weights in FP8, which would leave with them; remove it",
    ),
    "fewer offloaded layers than have one input": (
        ["policy.recompute={name: full, num_layers: 4}", "policy.offload_activations.layers=3"],
        "policy.offload_activations.layers",
        3,
        "policy.recompute keeps one input of every 4 layers; set it to at least that",
    ),
    "no number of offloaded layers": (
        ["policy.offload_activations.layers=some"],
        "policy.offload_activations.layers",
        "some",
        'expected an integer of at least 1, or "auto"',
    ),
    "leaving the device to nobody": (
        [*SFT, "algorithm.validation={}", "policy.offload.optimizer=true"],
        "policy.offload.optimizer",
        True,
        "this run never generates",
    ),
}

BY_ITSELF = "generation.backend=megatron"
# A policy that samples its own tokens.
BY_ITSELF_WRONG: dict[str, tuple[list[str], str, Any, str]] = {
    "parts of sequences to decode": (
        [BY_ITSELF, "policy.layout.context_parallel_size=2"],
        "policy.layout.context_parallel_size",
        2,
        "set it to 1, or use another generation.backend",
    ),
    "interleaved stages to decode": (
        [BY_ITSELF, "policy.layout={pipeline_parallel_size: 2, virtual_pipeline_parallel_size: 2}"],
        "policy.layout.virtual_pipeline_parallel_size",
        2,
        "generation.backend megatron decodes with one run of layers per stage",
    ),
    "weights away while they sample": (
        [BY_ITSELF, "policy.offload.weights=true"],
        "policy.offload.weights",
        True,
        "generation.backend megatron samples with these weights",
    ),
    "engines of a policy that samples by itself": (
        [BY_ITSELF, "generation.replicas=2"],
        "generation.replicas",
        2,
        "the policy's processes sample, and their number is policy.layout.data_parallel_size",
    ),
    "more engines of a policy that samples by itself": (
        [BY_ITSELF, "generation.max_replicas=2"],
        "generation.max_replicas",
        2,
        "the policy's processes sample, and their number is policy.layout.data_parallel_size",
    ),
    "more engines on the policy's devices": (
        ["generation={backend: vllm, colocated: true, max_replicas: 2}"],
        "generation.max_replicas",
        2,
        "engines on the policy's devices are as many as those; remove it, or set colocated to false",
    ),
    "fewer engines than a run begins with": (
        ["generation.replicas=3", "generation.max_replicas=2"],
        "generation.max_replicas",
        2,
        "a run begins with generation.replicas, 3; set it to at least that",
    ),
    "another type than the policy's own": (
        [BY_ITSELF, "generation.precision=bfloat16"],
        "generation.precision",
        "bfloat16",
        "the policy's processes sample, and it computes in policy.precision; remove it",
    ),
    "buckets for weights that do not travel": (
        [BY_ITSELF, "generation.bucket_megabytes=8"],
        "generation.bucket_megabytes",
        8,
        "the policy's processes sample, and no weights are sent; remove it",
    ),
    "a way for weights that do not travel": (
        [BY_ITSELF, "generation.transport=files"],
        "generation.transport",
        "files",
        "the policy's processes sample, and no weights are sent; remove it",
    ),
    "changes of weights that do not travel": (
        [BY_ITSELF, "generation.delta=true", "policy.precision=bfloat16"],
        "generation.delta",
        True,
        "the policy's processes sample, and no weights are sent; remove it",
    ),
    "checks of weights that do not travel": (
        [BY_ITSELF, "generation.check_one_in=4"],
        "generation.check_one_in",
        4,
        "the policy's processes sample, and no weights are sent; remove it",
    ),
    "threads of no engine": (
        [BY_ITSELF, "generation.threads=2"],
        "generation.threads",
        2,
        "the policy's processes sample, and its processes have cluster.policy_threads; remove it",
    ),
    "a cache for less than a sequence of its own": (
        [BY_ITSELF, "generation.max_kv_tokens=8"],
        "generation.max_kv_tokens",
        8,
        "the cache must hold a complete conversation",
    ),
    "too few GPUs for a policy alone": (
        [BY_ITSELF, "cluster.gpus_per_node=3", "policy.layout.tensor_parallel_size=4"],
        "cluster.gpus_per_node",
        3,
        "3 GPUs are too few for 4 policy processes",
    ),
}

WRONG = TYPES | RELATIONS | BY_ITSELF_WRONG


@pytest.mark.parametrize(("overrides", "field", "value", "fix"), WRONG.values(), ids=WRONG.keys())
def test_it_is_refused_with_field_value_and_fix(
    sound: Path, overrides: list[str], field: str, value: Any, fix: str
) -> None:
    refuses(sound, overrides, field, value, fix)


def test_a_dataset_must_say_which_one_it_is(tmp_path: Path) -> None:
    file = write(tmp_path, GRPO.replace("train: {name: arithmetic, ", "train: {"))

    (problem,) = problems_of(file)

    assert (problem.field, problem.value) == ("data.train.name", ABSENT)
    assert problem.fix.startswith(
        "this field is required; use one of `tasks`, `jsonl`, `generator`, `reasoning_gym`, "
    )


# What looks like the mistakes above and is none.
RIGHT: dict[str, list[str]] = {
    "as it is": [],
    "filters in validation": [VALIDATION + "sampling={top_k: 20, top_p: 0.9}", VALIDATION + "period=2"],
    "filters in training": ["generation.sampling={top_k: 20, top_p: 0.9}"],
    "min-p in training": ["generation.sampling={top_k: 20, min_p: 0.1}"],
    "both ratios in validation": [VALIDATION + "sampling={min_p: 0.1, top_p: 0.9}", VALIDATION + "period=2"],
    "greedy validation of one sample": [VALIDATION + "sampling={temperature: 0}"],
    "filters in SFT's validation": [*SFT, "generation.sampling.top_p=0.9", VALIDATION + "at_end=true"],
    "SFT without a reward": [*SFT, "rewards=[]"],
    "SFT with a turn too long that is never taken": [*SFT, "generation.max_new_tokens=64"],
    "validation data for `nemorl eval`": [VALIDATION + "num_prompts=100"],
    "an environment that pays": ["env.name=math", "rewards=[]"],
    "the calculator in a chat": ["env.name=calculator", *CHAT],
    "near sums of other sizes": ["data.validation={name: arithmetic, digits: 3, size: 100}"],
    "games": [*GAMES, "rewards=[]"],
    "far puzzles": [*PUZZLES, "data.validation.seed=100"],
    "other puzzles of the same seed": [*PUZZLES, "data.validation={task: basic_arithmetic, seed: 0}"],
    "GPUs for all": ["cluster.gpus_per_node=5", "policy.layout.tensor_parallel_size=4"],
    "REINFORCE weighed against the engine": [
        "algorithm.loss={name: reinforce}",
        "algorithm.correction={name: tis, form: bypass}",
    ],
    "a divergence with the value of k1": [
        "algorithm.kl={coefficient: 0.1, estimator: k1, straight_through: true}"
    ],
    "k1 as a penalty": ["algorithm.kl={coefficient: 0.1, estimator: k1, placement: reward}"],
    "a best checkpoint by a correction": [
        "algorithm.correction={name: icepop}",
        "checkpointing.metric=correction/ess",
    ],
    "a norm with its length": [
        "algorithm.loss.aggregation=seq-mean-token-sum-norm",
        "algorithm.loss.aggregation_length=8",
    ],
    "a best checkpoint by a training figure": ["checkpointing.metric=reward/mean"],
    "a best checkpoint by one reward": ["checkpointing.metric=reward/exact_match"],
    "a best checkpoint by a reward in validation": [
        "checkpointing={metric: validation/reward/exact_match, higher_is_better: false}",
        VALIDATION + "period=2",
    ],
    "a best checkpoint by how long a reward takes": [
        "checkpointing={metric: reward_seconds/exact_match, higher_is_better: false}"
    ],
    "a judge and a reward model": [
        f"rewards=[{JUDGE}}}, {{kind: model, url: 'http://localhost:8000', model: m, protocol: vllm}}]"
    ],
    "a best checkpoint by a loss": [*SFT, "checkpointing={metric: loss/sft, higher_is_better: false}"],
    "no checkpoints": ["checkpointing.enabled=false"],
    "GPUs for a policy that samples by itself": [
        BY_ITSELF,
        "cluster.gpus_per_node=4",
        "policy.layout.tensor_parallel_size=4",
    ],
    "a policy that leaves its optimizer aside while it samples": [
        BY_ITSELF,
        "policy.offload.optimizer=true",
    ],
    "an optimizer that does not repeat its default name": ["policy.optimizer={lr: 1e-5}"],
}


@pytest.mark.parametrize("overrides", RIGHT.values(), ids=RIGHT.keys())
def test_it_is_taken(sound: Path, overrides: list[str]) -> None:
    load_experiment(sound, overrides)


@pytest.mark.parametrize(("name", "value"), [("top_k", 20), ("top_p", 0.9), ("min_p", 0.1)])
def test_filtered_samples_train_where_the_engine_has_their_logprobs(
    tmp_path: Path, name: str, value: float
) -> None:
    algorithm = load_experiment(write(tmp_path, GRPO)).algorithm

    def problems(generation: type[GenerationBase]) -> list[Problem]:
        section: Any = generation.model_construct(sampling=SamplingConfig.model_validate({name: value}))
        return list(samples_can_be_learned_from(section, algorithm))

    for trains in (
        *(TorchGenerationConfig, MegatronGenerationConfig, TrtllmGenerationConfig),
        *(VllmGenerationConfig, VllmServerGenerationConfig),
    ):
        assert problems(trains) == []
    (problem,) = problems(OpenAIGenerationConfig)
    assert (problem.field, problem.value) == (f"generation.sampling.{name}", value)
    assert "may return logprobs of all tokens" in problem.fix


@pytest.mark.parametrize("sampling", ["top_p: 0.9, min_p: 0.1", "temperature: 0", "top_k: 1"])
def test_what_only_training_cannot_do_is_evaluated(tmp_path: Path, sampling: str) -> None:
    path, overrides = write(tmp_path, GRPO), [f"generation.sampling={{{sampling}}}"]
    (problem,) = examine(path, overrides).problems
    assert problem.field.startswith("generation.sampling.")
    assert examine(path, overrides, training=False).problems == ()


DATA: dict[str, tuple[str, str, str]] = {
    "subset of a file": ("{name: tasks, path: a.jsonl, subset: main}", "subset", "set split"),
    "some weights": (
        "{name: mixture, sources: {a: {dataset: SUMS, weight: 1}, b: {dataset: SUMS}}}",
        "train.sources.b.weight",
        "set it for all, or for none",
    ),
    "sources that end": (
        "{name: mixture, sources: {a: {dataset: SUMS, max_epochs: 1}}}",
        "train.sources.a.max_epochs",
        "set it to null for one",
    ),
    "an empty window": (
        "SUMS, sampling: {pass_rate: {min: 0.6, max: 0.4}}",
        "sampling.pass_rate.min",
        "lower it",
    ),
    "a window of everything": (
        "SUMS, sampling: {pass_rate: {}}",
        "sampling.pass_rate.max",
        "nothing is skipped",
    ),
    "a pass reward of nothing": ("SUMS, sampling: {pass_reward: 2}", "sampling.pass_reward", "nothing uses"),
    "a sorted stream": (
        "{name: generator, function: 'a:b', size: 9}, sampling: {curriculum: {key: k, stages: [{steps: 1}]}}",
        "sampling.curriculum.key",
        "cannot be sorted",
    ),
    "a validation in a stream": (
        "SUMS, validation: {name: tasks, path: v.jsonl, stream: {size: 5}}",
        "validation.stream",
        "remove it",
    ),
    "a file of a mixture": (
        "{name: mixture, sources: {a: {dataset: {name: tasks, path: a.jsonl}}}}, "
        "validation: {name: tasks, path: a.jsonl}",
        "validation.path",
        "training reads the same file",
    ),
}


@pytest.mark.parametrize(("text", "field", "fix"), DATA.values(), ids=DATA)
def test_data_is_refused_with_field_and_fix(text: str, field: str, fix: str) -> None:
    sums = "{name: arithmetic, digits: 1, size: 5}"
    data = DataConfig.model_validate(yaml.safe_load(f"{{train: {text.replace('SUMS', sums)}}}"))

    (problem,) = data.problems({})

    assert problem.field.endswith(field)
    assert fix in problem.fix
