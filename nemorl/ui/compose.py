"""What the screen Compose knows of an experiment that is not saved: its problems, its form and its picture.

The functions of this module import the user's code where a config names some, so they run in a child process.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

from nemorl.config import shipped
from nemorl.config.algorithm import OnlineBase
from nemorl.config.environment import EnvBase
from nemorl.config.experiment import Experiment
from nemorl.config.facts import models_of, reward_weights
from nemorl.config.load import DEFAULTS, Loaded, examine, read_document, with_origin
from nemorl.config.policy import LayoutConfig, PolicyConfig
from nemorl.config.yaml import field_path, is_written, parse_document, parse_value
from nemorl.errors import ConfigError, NemorlError, Problem
from nemorl.models.hf_config import BrokenModelFolder, UnsupportedModel
from nemorl.models.hub import with_local_models
from nemorl.models.registry import policy_shape
from nemorl.models.shape import ModelShape
from nemorl.plan.generation_time import default_lengths
from nemorl.plan.hardware import HARDWARE
from nemorl.plan.layouts import list_layouts
from nemorl.plan.machine import Gpu, Machine, gpu_problems, memory_problems, read_machine
from nemorl.plan.memory import MEMORY_PARTS, ON_HOST, ProcessMemory
from nemorl.plan.problems import Plan, model_problem
from nemorl.plan.recompute import kept_by
from nemorl.plan.step_time import UnplannedRun
from nemorl.plan.suggest import suggest
from nemorl.run.inspection import Inspected, Where, inspect, occupied
from nemorl.run.verdict import problem_json, report_json

from .forms import form
from .yaml_edit import dump_block

Json = dict[str, Any]
_MAX_LAYOUTS = 60
_MAX_SUGGESTIONS = 12
_GB = 10**9


@dataclass(frozen=True)
class Preset:
    """A machine of a run, for the plan."""

    title: str
    machine: Machine | None  # None for this one
    hardware: str = ""  # in the plan of time


def _gpus(number: int, name: str, mebibytes: int, cores: int, gigabytes: int) -> Machine:
    gpus = (Gpu(name, mebibytes * 2**20),) * number
    return Machine(cores, gigabytes * _GB, gigabytes * _GB // 2, gpus, nodes=1, same_packages=False)


def _of_hardware(number: int, name: str, cores: int, gigabytes: int) -> Preset:
    hardware = HARDWARE[name]
    machine = _gpus(number, hardware.device_name, hardware.memory_bytes >> 20, cores, gigabytes)
    size = {"h100": 80, "h200": 141}[name]  # as it is sold
    return Preset(f"{number} x {size} GB ({name.upper()})", machine, name)


PRESETS = {
    "here": Preset("this machine", None),
    "cpu": Preset("CPU, 8 cores, 32 GB", Machine(8, 32 * _GB, 16 * _GB, (), 1, same_packages=False)),
    "1x24": Preset("1 x 24 GB", _gpus(1, "GPU of 24 GB", 24_564, 16, 64)),
    "1x80": _of_hardware(1, "h100", 26, 200),
    "8x80": _of_hardware(8, "h100", 112, 2000),
    "8x141": _of_hardware(8, "h200", 112, 2000),
}


def preset_facts() -> list[Json]:
    """Names, titles and GPUs of the presets, and whether the plan of time knows their hardware."""
    facts: list[Json] = []
    for name, preset in PRESETS.items():
        machine = _machine(name)
        memory = min((gpu.memory_bytes for gpu in machine.gpus), default=machine.memory_bytes)
        fact = {"name": name, "title": preset.title, "gpus": len(machine.gpus), "memory": memory}
        facts.append({**fact, "ranks": bool(preset.hardware)})
    return facts


@cache
def _this_machine() -> Machine:
    return read_machine()


def _machine(preset: str) -> Machine:
    return PRESETS[preset].machine or _this_machine()


def check(text: str, file: str, preset: str = "here") -> Json:
    """The verdict of `nemorl check` on a text in the place of a file, with the form and the picture.

    `report` is what `nemorl check --json` prints of the file; on another machine than this one no function of
    the user's is called. A text that cannot be read has `broken`, its problem, and neither form nor picture.
    `occupied` is what a start adds to the problems if run_dir holds a run. Weights on the hub are not
    downloaded.
    """
    began = time.perf_counter()
    path, machine = Path(file), _machine(preset)
    where: Where = "unknown" if preset == "here" else "elsewhere"
    try:
        found = inspect(path, [], machine, where=where, weights="optional", text=text)
    except ConfigError as unreadable:
        report = report_json(path, None, unreadable)
        return {"report": report, "broken": report["problems"][0], "form": None, "picture": None}
    error = ConfigError(file, found.loaded.problems) if found.loaded.problems else None
    own = parse_document(text, file).tree
    answer = {
        "report": report_json(path, found, error),
        "broken": None,
        "form": form(found.loaded, own),
        "picture": picture(found, machine),
        "run_dir": str(own.get("run_dir", "") or found.loaded.document.tree.get("run_dir", "")),
        "occupied": _occupied(found.loaded, path),
    }
    return {**answer, "seconds": time.perf_counter() - began}


def _occupied(loaded: Loaded, path: Path) -> Json | None:
    """The problem of `nemorl train`, which `nemorl check` does not have: the file may be that of the run."""
    run_dir = loaded.sections.get("run_dir")
    with suppress(OSError):  # which the checks report
        if isinstance(run_dir, Path) and (fix := occupied(run_dir)) is not None:
            return problem_json(with_origin(Problem("run_dir", str(run_dir), fix), loaded.document), path)
    return None


def picture(found: Inspected, machine: Machine) -> Json | None:
    """Models, engines, environment and rewards of a run, with processes, devices and memory, and their flow.

    None where types are wrong. Without a plan, as where the model is missing, no memory is known.
    """
    experiment = found.experiment or found.loaded.experiment
    if experiment is None:
        return None
    processes = {p.group: p for p in (found.plan.processes if found.plan else ())}
    gpus = experiment.cluster.gpus_per_node > 0
    room = min((gpu.memory_bytes for gpu in machine.gpus), default=None) if gpus else machine.memory_bytes
    refused = _refused(experiment, found.plan, machine)
    nodes: list[Json] = []
    node: Json
    for model in models_of(experiment):
        layout, path = model.config.layout, str(model.config.model_path)
        node = {"name": model.name, "section": model.section, "role": _role(model.name), "model": path}
        node |= {"layout": layout.name, "devices": layout.world_size, "shares": model.on_policy_devices}
        nodes.append({**node, **_memory(processes.pop(model.name, None), room, gpus=gpus, refused=refused)})
    generation = experiment.generation
    if "generation" in processes or experiment.algorithm.generates:
        node = {"name": "generation", "section": "generation", "role": "engine", "model": generation.backend}
        devices = generation.replicas * generation.ranks_per_replica if generation.has_engines else 0
        node |= {"layout": f"{generation.replicas} x {generation.backend}", "devices": devices}
        node["shares"] = generation.takes_turns
        node |= _memory(processes.pop("generation", None), room, gpus=gpus, refused=refused)
        nodes.append(node)
    for group, process in processes.items():
        node = {"name": group, "section": "cluster", "role": _role(group), "model": "", "layout": ""}
        node |= {"devices": 0, "shares": False}
        nodes.append({**node, **_memory(process, machine.memory_bytes, gpus=False, refused=refused)})
    if experiment.algorithm.generates:
        env: Json = {"name": "env", "section": "env", "role": "environment", "model": experiment.env.name}
        nodes.append({**env, "layout": "", "devices": 0, "processes": 0, "shares": False, "fits": True})
        names = ", ".join(reward_weights(experiment.env, experiment.rewards))
        rewards: Json = {"name": "rewards", "section": "rewards", "role": "rewards", "model": names}
        nodes.append({**rewards, "layout": "", "devices": 0, "processes": 0, "shares": False, "fits": True})
    own = sum(node["devices"] for node in nodes if not node["shares"]) if gpus else 0
    cluster = experiment.cluster
    return {
        "nodes": nodes,
        "edges": _edges(experiment, {node["name"] for node in nodes}),
        "room": room,
        "gpus": cluster.num_nodes * cluster.gpus_per_node,
        "used_gpus": own,
        "on_host": sum(node.get("on_host", 0) for node in nodes),
        "parts": list(MEMORY_PARTS),
        "problems": list(dict.fromkeys(refused)),
        "known": found.plan is not None and bool(found.plan.processes),
        "samples": isinstance(experiment.algorithm, OnlineBase),  # so the plan of time ranks whole runs
    }


def _refused(experiment: Experiment, plan: Plan | None, machine: Machine) -> list[str]:
    """Sentences on what does not fit."""
    problems = [p.fix for p in gpu_problems(experiment, machine)]
    if plan is not None and plan.processes:
        problems += [p.fix for p in memory_problems(experiment, plan.processes, machine)]
    return problems


def _memory(process: ProcessMemory | None, room: int | None, *, gpus: bool, refused: list[str]) -> Json:
    """Bytes of one process by part, and whether it fits: into its device, or on a CPU with all others."""
    if process is None:
        return {"processes": 0, "memory": None, "total": None, "parts": {}, "fits": True}
    size = process.on_device if gpus else process.total
    is_named = any(f"{process.group} process" in text for text in refused)
    held = (part for part in MEMORY_PARTS if not (gpus and part in ON_HOST))
    parts = {part: value for part in held if (value := getattr(process, part))}
    fits = (room is None or size <= room) and not is_named
    total = process.total * process.count
    on_host = (process.total - process.on_device if gpus else process.total) * process.count
    found = {"processes": process.count, "memory": size, "total": total, "parts": parts, "fits": fits}
    return {**found, "room": room if gpus else None, "on_host": on_host}


def _role(group: str) -> str:
    known = {"policy": "actor", "driver": "driver", "rollout": "rollout workers", "endpoint": "endpoint"}
    named = {"teacher_": "teacher", "rewards_": "reward model", "reward_": "reward model"}
    prefixed = next((role for prefix, role in named.items() if group.startswith(prefix)), group)
    return known.get(group, prefixed)


def _edges(experiment: Experiment, names: set[str]) -> list[Json]:
    """What flows between the parts of a step."""
    flow: list[tuple[str, str, str]] = []
    if experiment.algorithm.online:
        flow = [("rollout", "generation", "prompts"), ("generation", "env", "answers")]
        flow += [("env", "rewards", "trajectories"), ("rewards", "policy", "rewards")]
    if experiment.algorithm.generates and experiment.generation.takes_weights:
        flow.append(("policy", "generation", "weights"))
    known = {"critic": "values", "reference": "logprobs"}
    for name in sorted(names):
        if name in known or name.startswith("teacher_"):
            flow.append((name, "policy", known.get(name, "logprobs")))
        elif name.startswith("reward") and name != "rewards":
            flow.append((name, "rewards", "scores"))
    return [{"from": a, "to": b, "what": what} for a, b, what in flow]


def layouts(text: str, file: str, preset: str, devices: int | None) -> Json:
    """The policy's layouts on a number of devices (null: as many as it has now), best first, and, where the
    plan of time knows the hardware, whole runs by the seconds of a step. Each row has the fields to set.

    Raises ConfigError and NemorlError.
    """
    experiment, shape = _planned(text, file)
    machine, number = _machine(preset), devices or experiment.policy.layout.world_size
    memory = min((gpu.memory_bytes for gpu in machine.gpus), default=None)
    rates = HARDWARE[hardware] if (hardware := PRESETS[preset].hardware) else None
    found = list_layouts(experiment, shape, number, memory, hardware=rates)
    rows = [
        {
            "name": choice.layout.name,
            "fits": choice.fits,
            "memory": choice.memory.on_device,
            "parts": {part: size for part in MEMORY_PARTS if (size := getattr(choice.memory, part))},
            "bytes_per_token": choice.bytes_per_token,
            "idle": choice.idle,
            "recompute": kept_by(choice.recompute, choice.offload),
            "is_current": choice.layout == experiment.policy.layout,
            "edits": [_layout_edit(choice.layout, experiment.policy.layout)],
        }
        for choice in found[:_MAX_LAYOUTS]
    ]
    return {"devices": number, "room": memory, "count": len(found), "rows": rows}


def suggestions(text: str, file: str, preset: str, devices: int | None) -> Json:
    """Placements, splits and layouts of a run by the plan of time, fastest first. Raises as `layouts`, and
    for hardware or an experiment that the plan of time does not know."""
    hardware = PRESETS[preset].hardware
    if not hardware:
        raise NemorlError("the plan of time knows H100 and H200 here; choose such a machine")
    experiment, shape = _planned(text, file)
    number = devices or len(_machine(preset).gpus)
    try:
        found = suggest(experiment, shape, HARDWARE[hardware], default_lengths(experiment), number, [0, 1])
    except UnplannedRun as error:
        raise NemorlError(str(error)) from error
    rows = [
        {
            "seconds": one.step.seconds,
            "reason": one.reason,
            "layout": one.plan.experiment.policy.layout.name,
            "placement": "shared" if one.plan.experiment.generation.shares_devices else "separate",
            "engines": f"{one.plan.replicas} x TP{one.plan.engine.tensor}",
            "staleness": getattr(one.plan.experiment.algorithm, "max_staleness", 0),
            "memory": one.memory,
            "edits": [_override_edit(override) for override in one.overrides],
        }
        for one in found[:_MAX_SUGGESTIONS]
    ]
    return {"devices": number, "room": HARDWARE[hardware].memory_bytes, "count": len(found), "rows": rows}


def _planned(text: str, file: str) -> tuple[Experiment, ModelShape]:
    loaded = examine(Path(file), text=text)
    if loaded.experiment is None:
        raise ConfigError(file, loaded.problems)
    experiment, absent = with_local_models(loaded.experiment, weights=False)
    if absent:
        raise ConfigError(file, absent)
    try:
        return experiment, policy_shape(experiment.policy)
    except (BrokenModelFolder, UnsupportedModel) as error:
        problem = model_problem("policy", experiment.policy.model_path, str(error))
        raise ConfigError(file, [problem]) from error


def _layout_edit(layout: LayoutConfig, current: LayoutConfig) -> Json:
    """With the fields that are not the default, or are not now: those may come from another file."""
    default, now = LayoutConfig().model_dump(mode="json"), current.model_dump(mode="json")
    fields = layout.model_dump(mode="json").items()
    value = {name: size for name, size in fields if not size == default[name] == now[name]}
    return {"path": ["policy", "layout"], "value": value}


def _override_edit(override: str) -> Json:
    field, _, text = override.partition("=")
    return {"path": list(field_path(field)), "value": parse_value(text, field, field_path(field))}


def own_edits(text: str, file: str, edits: Sequence[Json]) -> list[Json]:
    """Edits of the file itself: an item of a list that it inherits becomes a list of its own, and the fields
    of another variant, which a section would refuse, leave with the change of its variant (`"drops": […]`).

    Raises ConfigError.
    """
    result: list[Json] = []
    for one in edits:
        path = tuple(one["path"])
        index = next((place for place, step in enumerate(path) if isinstance(step, int)), None)
        around = path if one.get("append") else path[:index]
        own = parse_document(text, file).tree
        if (index is not None or one.get("append")) and not is_written(own, around):
            inherited: Any = read_document(Path(file), text=text).tree
            for step in around:
                inherited = inherited.get(step, []) if isinstance(inherited, dict) else []
            if inherited:
                result.append({"path": list(around), "value": inherited})
        dropped = [[*path[:-1], name] for name in one.get("drops", ())]
        written = [other for other in dropped if is_written(own, tuple(other))]
        result += [one, *({"path": other, "remove": True} for other in written)]
    return result


def starting_points() -> list[Json]:
    """The shipped experiments, as `nemorl recipes list` shows them."""
    return [asdict(recipe) for recipe in shipped.recipes()]


def recipe_text(name: str) -> str:
    """The text of a shipped experiment, complete: what it inherits is written out. Raises NemorlError."""
    if name not in shipped.names():
        raise NemorlError(f"no shipped experiment is named {name}; choose one of the list")
    text = shipped.file_of(name).read_text(encoding="utf-8")
    if DEFAULTS not in parse_document(text, name).tree:
        return text
    comment = list(takewhile(lambda line: line.startswith("#"), text.splitlines()))
    return "\n".join([*comment, *dump_block(read_document(shipped.file_of(name)).tree)]) + "\n"


AnswersOf = Literal["path", "lines"]


def score(text: str, file: str, kind: AnswersOf, source: str, limit: int) -> Json:
    """The rewards of answers: `source` is the path of a run folder or of a file of JSON lines, or such lines.

    Raises ConfigError and NemorlError.
    """
    from nemorl.rewards.preview import end_token, preview, read_answers
    from nemorl.rollout.earlier_answers import Found, answers_at

    loaded = examine(Path(file), text=text)
    wrong = [p for p in loaded.problems if p.field.partition(".")[0] in ("rewards", "env")]
    if wrong or "rewards" not in loaded.sections:
        raise ConfigError(file, wrong or loaded.problems)
    rewards = loaded.sections["rewards"]
    assert isinstance(rewards, tuple)
    env, data, cluster = (loaded.sections.get(name) for name in ("env", "data", "cluster"))
    policy = loaded.sections.get("policy")
    end = end_token(policy.tokenizer_folder) if isinstance(policy, PolicyConfig) else ""
    try:
        if kind == "path":
            found = answers_at(Path(source), limit, end)
        else:
            answers, problems = read_answers(source, limit)
            found = Found(answers, "the text", problems)
    except (OSError, UnicodeDecodeError) as error:
        named, reason = getattr(error, "filename", None) or source, getattr(error, "strerror", None)
        fix = "choose a run with trajectories or samples (section logger), or a file of JSON lines"
        raise NemorlError(f"{named}: {reason or 'not UTF-8 text'}; {fix}") from error
    if not found.answers:
        first = found.problems[0] if found.problems else f"{found.source} is empty"
        raise NemorlError(f"no answers to score: {first}")
    weights = env.reward_weights if isinstance(env, EnvBase) else {}
    seconds = cluster.deadlines.environment if cluster is not None else 60.0  # type: ignore[attr-defined]
    chat = bool(getattr(data, "chat", True))
    scored = preview(rewards, weights, found.answers, chat=chat, seconds=min(seconds, PREVIEW_SECONDS / 2))
    return {**scored.as_json(), "source": found.source, "problems": found.problems}


PREVIEW_SECONDS = 60.0
CHECK_SECONDS = 30.0
