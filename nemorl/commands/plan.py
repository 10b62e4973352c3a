"""`nemorl plan`: an experiment's layouts, its time and its rehearsal, before anything starts."""

import json
import math
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.table import Table

from nemorl.config.base import counted
from nemorl.config.experiment import Experiment
from nemorl.config.policy import ActivationOffloadConfig
from nemorl.errors import UsageError
from nemorl.plan.calibration import (
    HERE,
    Calibration,
    MeasuredRun,
    calibrate,
    load_planned,
    read_calibration,
    read_run,
    write_calibration,
)
from nemorl.plan.generation_time import default_lengths
from nemorl.plan.hardware import HARDWARE, MARGIN, known_hardware
from nemorl.plan.layouts import ORDER, LayoutChoice, list_layouts
from nemorl.plan.machine import read_machine
from nemorl.plan.memory import MEMORY_PARTS, policy_memory
from nemorl.plan.recompute import fitting, fitting_recompute, kept_by, leaves_a_choice
from nemorl.plan.step_time import RunPlan, StepTime, UnplannedRun
from nemorl.plan.suggest import Suggestion, suggest
from nemorl.plan.training_time import Lengths

from . import terminal
from .terminal import Commands, ExitCode, say

if TYPE_CHECKING:  # which import torch
    from nemorl.rehearsal.execution import Event
    from nemorl.rehearsal.ranks import Comparison
    from nemorl.rehearsal.worker import RankReport

# The parts of the memory that have a column of their own, and the short headers of some.
_PARTS = ("weights", "gradients", "optimizer", "reference", "activations", "logits")
_SHORT = {"gradients": "grads", "optimizer": "optim", "reference": "ref", "activations": "activ"}
# The same of a rehearsal.
_REHEARSED = (*_PARTS, "kv_cache", "staging")
_GPU_GB = round(HARDWARE["h100"].memory_bytes / 1e9, 1)
HARDWARE_HELP = f"device of the run: {', '.join(HARDWARE)}, `{HERE}` to measure this machine, or a YAML file"
_ROWS = 40
_SIMULATED_STEPS = 3
_CHOICE_WIDTH = 40  # of the column with what is recomputed
_WIDTH = 120  # a narrower terminal breaks the lines, which beats breaking words


def register(commands: Commands) -> None:
    group = terminal.add_group(commands, "plan", "estimate memory and time of a run")
    layouts = terminal.add_command(group, "layouts", _layouts, "list the policy's valid parallel layouts")
    layouts.description = f"list all valid parallel layouts of the policy on N devices. {ORDER}"
    terminal.add_experiment(layouts)
    gpus_help = "number of devices for the policy"
    layouts.add_argument("--gpus", type=terminal.positive_integer, required=True, metavar="N", help=gpus_help)
    memory_help = "available memory of a device in GB (10^9 bytes); default: this machine's smallest GPU"
    layouts.add_argument("--memory-gb", type=terminal.positive_number, metavar="GB", help=memory_help)
    rates_help = "device whose memory and rates are used; without it those of this machine's GPU, if known"
    layouts.add_argument("--hardware", metavar="NAME_OR_FILE", help=rates_help)
    layouts.add_argument("--json", action="store_true", help="print all values as JSON, with sizes in bytes")
    _register_time(group)
    _register_suggest(group)
    _register_rehearsal(group)


def _register_time(group: Commands) -> None:
    text = "estimate the seconds of a step, and what bounds them"
    parser = terminal.add_command(group, "time", _time, text)
    parser.description = (
        f"{text}: of each stage, by operations, bytes and messages on this hardware. The model needs a "
        "config.json only. docs/plan_time.md has the formulas and published runs with their predictions."
    )
    terminal.add_experiment(parser)
    _add_hardware(parser)
    parser.add_argument(
        "--calibrate",
        type=Path,
        nargs="+",
        default=[],
        metavar="RUN_DIR",
        help="fit the constants to measured runs of this model, and compare",
    )
    output_help = "write the hardware and its constants to a file, which --hardware reads"
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help=output_help)
    _add_lengths(parser)
    price_help = "price of a device for an hour; adds the cost of a million trained tokens"
    parser.add_argument("--price-per-gpu-hour", type=terminal.positive_number, metavar="X", help=price_help)
    parser.add_argument("--json", action="store_true", help="print all values as JSON, in seconds")


def _add_hardware(parser: ArgumentParser) -> None:
    parser.add_argument("--hardware", required=True, metavar="NAME_OR_FILE", help=HARDWARE_HELP)


def _add_lengths(parser: ArgumentParser) -> None:
    for name, what in (("prompt", "of a prompt"), ("response", "sampled for a prompt, all turns included")):
        help_text = f"mean tokens {what}; assumed when not given"
        parser.add_argument(f"--{name}-tokens", type=terminal.positive_number, metavar="N", help=help_text)
    spread_help = "standard deviation of the logarithm of response lengths; 0 makes them equal (default: 1)"
    parser.add_argument("--spread", type=terminal.nonnegative_number, metavar="S", help=spread_help)


def _register_suggest(group: Commands) -> None:
    text = "rank placements, splits of the devices, layouts and staleness by the seconds of a step"
    parser = terminal.add_command(group, "suggest", _suggest, text)
    parser.description = (
        f"{text}. For each placement and split it takes the fastest layout and engines that fit, by the plan "
        "of time (docs/plan_time.md), and prints the fields to set. A larger max_staleness changes what is "
        "learned, so compare with docs/asynchronous.md."
    )
    terminal.add_experiment(parser)
    _add_hardware(parser)
    gpus_help = "number of devices, of policy and engines together"
    parser.add_argument("--gpus", type=terminal.positive_integer, required=True, metavar="N", help=gpus_help)
    staleness_help = "values of algorithm.max_staleness to try for engines of their own (default: 0,1)"
    parser.add_argument("--staleness", type=_numbers, default=[0, 1], metavar="S,...", help=staleness_help)
    _add_lengths(parser)
    simulate_help = "run the first N in the simulator too (default: 0)"
    parser.add_argument(
        "--simulate", type=terminal.natural_number, default=0, metavar="N", help=simulate_help
    )
    parser.add_argument("--json", action="store_true", help="print all values as JSON, in seconds")


def _register_rehearsal(group: Commands) -> None:
    text = "run the worker code of an experiment without a GPU, and measure its memory"
    parser = terminal.add_command(group, "rehearse", _rehearse, text)
    parser.description = (
        f"{text}: build, load, logprobs, training, refit and offloading, with tensors that have shapes "
        "and no data. It prints the peak of each rank next to the memory plan, and where the host waits "
        "for the device. The model needs a config.json only. Nothing is run on hardware."
    )
    terminal.add_experiment(parser)
    ranks_help = "ranks of the policy, such as 0,8,56; default: one of the first, a middle and the last stage"
    parser.add_argument("--ranks", type=_numbers, metavar="N,...", help=ranks_help)
    memory_help = f"memory of a device in GB (10^9 bytes); default: {_GPU_GB}, an H100's"
    parser.add_argument(
        "--memory-gb", type=terminal.positive_number, default=_GPU_GB, metavar="GB", help=memory_help
    )
    processes_help = "ranks that are rehearsed at a time; each takes a core and up to 2 GB (default: 1)"
    parser.add_argument(
        "--processes", type=terminal.positive_integer, default=1, metavar="N", help=processes_help
    )
    parser.add_argument("--json", action="store_true", help="print all values as JSON, with sizes in bytes")


def _layouts(arguments: Namespace) -> int:
    experiment, shape = load_planned(arguments.config, arguments.overrides, lays_out=False)
    gpu = min(read_machine().gpus, key=lambda gpu: gpu.memory_bytes, default=None)
    memory_bytes = None if gpu is None else gpu.memory_bytes
    hardware = None if gpu is None else known_hardware(gpu.name)
    if arguments.hardware is not None:
        hardware = read_calibration(arguments.hardware).hardware
        memory_bytes = hardware.memory_bytes
    if arguments.memory_gb is not None:
        memory_bytes = int(arguments.memory_gb * 1e9)
    choices = list_layouts(experiment, shape, arguments.gpus, memory_bytes, hardware=hardware)
    if not choices:
        problem = f"no layout of {experiment.policy.model_path} takes {arguments.gpus} devices"
        heads = f"{shape.num_attention_heads} heads and {shape.num_key_value_heads} key-value heads"
        rules = f"tensor parallelism divides its {heads}, pipeline parallelism its {shape.num_layers} layers"
        data = "data parallelism the sequences of an optimizer step; try another number"
        raise UsageError(f"{problem}: {rules}, {data}")
    if arguments.json:
        say(json.dumps([_as_json(choice) for choice in choices], indent=2))
        return ExitCode.WELL
    console = terminal.output()
    is_chosen = leaves_a_choice(experiment.policy)
    console.width = max(console.width, _WIDTH + _CHOICE_WIDTH * is_chosen)
    console.print(_table(choices[:_ROWS], is_chosen=is_chosen))
    if choices[0].reason:
        terminal.notes().print(f"first layout: {choices[0].reason}.", markup=False)
    more = f", the first {_ROWS} are shown (--json gives all)" if len(choices) > _ROWS else ""
    unknown = "" if memory_bytes else " This machine has no GPU: give --memory-gb to see which fit."
    terminal.notes().print(f"{counted(len(choices), 'layout')}{more}. {ORDER}{unknown}", markup=False)
    return ExitCode.WELL


def _time(arguments: Namespace) -> int:
    experiment, shape = load_planned(arguments.config, arguments.overrides)
    is_chosen = leaves_a_choice(experiment.policy)
    runs = [read_run(folder, shape) for folder in arguments.calibrate]
    start = read_calibration(arguments.hardware)
    hardware = start.hardware.shared_by(experiment.policy.layout.world_size)
    chosen = fitting(experiment, shape, hardware.usable_bytes, hardware)
    experiment, policy = chosen.experiment, chosen.experiment.policy
    needed = policy_memory(experiment, shape).on_device
    status = ExitCode.FAILED if needed > hardware.memory_bytes else ExitCode.WELL
    lengths = _lengths(experiment, arguments)
    try:
        calibration = calibrate(runs, start) if runs else start
        compared = [_compared(run, start, calibration) for run in runs]
        plan = RunPlan(experiment, shape, calibration.hardware, lengths, calibration.attained)
        step = plan.step()
    except UnplannedRun as error:
        raise UsageError(str(error)) from error
    if arguments.output is not None:
        write_calibration(calibration, arguments.output, _notes(runs, compared))
    rows, price = _totals(step, plan, arguments.price_per_gpu_hour), arguments.price_per_gpu_hour
    if arguments.json:
        stages = {name: {"bound": cost.bound, **asdict(cost)} for name, cost in step.stages.items()}
        values = asdict(step) | {"stages": stages, "tokens_per_second": step.tokens_per_second}
        values |= {"hardware": hardware.name, "lengths": asdict(lengths)}
        values |= {"recompute": policy.recompute.model_dump(), "fits": status is ExitCode.WELL}
        values |= {"offload_activations": _dumped(policy.offload_activations), "choice": chosen.reason}
        values |= {"memory_on_device": needed, "device_memory": hardware.memory_bytes}
        values |= {} if price is None else {"cost_per_million_tokens": step.cost_per_million(price)}
        values |= {"calibration": compared, "attained": asdict(calibration.attained)} if runs else {}
        say(json.dumps(values, indent=2))
        return status
    console = terminal.output()
    console.width = max(console.width, _WIDTH)
    if runs:
        console.print(_calibrated(compared))
    console.print(_stages(step, plan))
    share, room = needed / hardware.memory_bytes, f"{hardware.memory_bytes / 1e9:.1f} GB"
    rows["memory of the policy's fullest rank"] = f"{_digits(needed / 1e9)} of {room} ({share:.0%})"
    by_plan = is_chosen * " (chosen by the plan)"
    rows["recomputed"] = policy.recompute.described + by_plan
    if policy.offload_activations is not None or chosen.reason:
        rows["activations offloaded"] = _offloaded(policy.offload_activations) + by_plan
    if chosen.reason:
        rows["of the choice"] = chosen.reason
    result = terminal.table("The run", ["", "value"])
    for name, value in rows.items():
        result.add_row(name, value)
    console.print(result)
    if needed > hardware.usable_bytes:
        problem = f"needs {_digits(needed / 1e9)} of {room}"
        if status is ExitCode.WELL:
            problem = f"leaves {1 - share:.0%} of {room}, less than the margin of {MARGIN:.0%}"
        terminal.complain(f"The policy {problem}: `nemorl plan layouts` lists layouts that fit.")
    _note_lengths(experiment, lengths, arguments)
    return status


def _compared(run: MeasuredRun, before: Calibration, after: Calibration) -> dict[str, Any]:
    """Seconds of a run's stages, measured and predicted."""
    first, fitted = run.predicted(before), run.predicted(after)
    stages = {
        name: {"measured": seconds, "before": first[name], "fitted": fitted[name]}
        for name, seconds in run.seconds.items()
    }
    return {"run": run.name, "steps": run.steps, "lengths": asdict(run.lengths), "stages": stages}


def _calibrated(compared: list[dict[str, Any]]) -> Table:
    title = "Measured runs, in seconds (medians), next to the plan before and after the fit"
    result = terminal.table(title, ["run", "stage", "measured", "before", "", "fitted", ""])
    for run in compared:
        for stage, seconds in run["stages"].items():
            measured = seconds["measured"]
            cells = [_digits(measured)]
            for planned in (seconds["before"], seconds["fitted"]):
                cells += [_digits(planned), f"{planned / measured - 1:+.0%}" if measured else ""]
            result.add_row(run["run"], stage, *cells)
    return result


def _notes(runs: list[MeasuredRun], compared: list[dict[str, Any]]) -> list[str]:
    """What a file of hardware says about its origin."""
    if not runs:
        return []
    steps = [run["stages"]["step"] for run in compared]
    errors = [abs(step["fitted"] / step["measured"] - 1) for step in steps if step["measured"]]
    names = ", ".join(run.name for run in runs)
    error = f"; median error of their steps {median(errors):.0%}" if errors else ""
    return [f"Fitted to {names}{error}."]


def _note_lengths(experiment: Experiment, lengths: Lengths, arguments: Namespace) -> None:
    notes = [f"responses of {lengths.response:.0f} tokens on average, at most {lengths.limit:.0f}"]
    notes.append(f"prompts of {lengths.prompt:.0f}")
    assumed = arguments.response_tokens is None and experiment.algorithm.online
    hint = " These lengths are assumed: give --response-tokens." if assumed else ""
    terminal.notes().print(f"planned for {' and '.join(notes)}.{hint}", markup=False)


def _suggest(arguments: Namespace) -> int:
    experiment, shape = load_planned(arguments.config, arguments.overrides, lays_out=False)
    calibration = read_calibration(arguments.hardware)
    hardware, attained = calibration.hardware, calibration.attained
    lengths = _lengths(experiment, arguments)
    try:
        found = suggest(experiment, shape, hardware, lengths, arguments.gpus, arguments.staleness, attained)
    except UnplannedRun as error:
        raise UsageError(str(error)) from error
    if not found:
        fix = "give more devices, a smaller policy.micro_batch_tokens, or policy.recompute={name: auto}"
        raise UsageError(f"--gpus {arguments.gpus}: no layout and engines fit on {hardware.name}; {fix}")
    simulated = [_simulated(suggestion.plan) for suggestion in found[: arguments.simulate]]
    if arguments.json:
        rows = [
            {
                "seconds": one.step.seconds,
                "reason": one.reason,
                "overrides": one.overrides,
                "recompute": one.plan.experiment.policy.recompute.model_dump(),
                "offload_activations": _dumped(one.plan.experiment.policy.offload_activations),
                "memory_on_device": one.memory,
                "device_memory": hardware.memory_bytes,
            }
            for one in found
        ]
        for row, seconds in zip(rows, simulated, strict=False):
            row["simulated_seconds"] = seconds
        say(json.dumps(rows, indent=2))
        return ExitCode.WELL
    console = terminal.output()
    console.width = max(console.width, 160)
    console.print(_suggestions(found[:_ROWS], simulated))
    say("\nFields of the first:")
    for override in found[0].overrides:
        say(f"  {override}")
    room = f"of the {hardware.memory_bytes / 1e9:.1f} GB of a device {MARGIN:.0%} stay free"
    terminal.notes().print(f"{room}, for what is not planned", markup=False)
    _note_lengths(experiment, lengths, arguments)
    return ExitCode.WELL


def _simulated(plan: RunPlan) -> float:
    """Seconds of a step in the simulator."""
    from nemorl.simulate.simulation import predict
    from nemorl.simulate.workload import planned_workload

    return predict(plan.experiment, planned_workload(plan), seed=0, num_steps=_SIMULATED_STEPS).step_seconds


def _suggestions(found: list[Suggestion], simulated: list[float]) -> Table:
    headers = ["seconds", *(["simulated"] if simulated else []), "placement", "policy", "GB", "recomputed"]
    title = "Seconds of a step, fastest first; GB of the policy's fullest rank, with its share of the device"
    result = terminal.table(title, [*headers, "engines", "staleness", "reason"])
    for index, one in enumerate(found):
        experiment, engine = one.plan.experiment, one.plan.engine
        times = [_digits(simulated[index]) if index < len(simulated) else ""] if simulated else []
        layout = experiment.policy.layout
        placement = "shared" if experiment.generation.shares_devices else "separate"
        result.add_row(
            *(_digits(one.step.seconds), *times, placement, f"{layout.world_size}: {layout.name}"),
            f"{one.memory / 1e9:.1f} ({one.memory / one.plan.hardware.memory_bytes:.0%})",
            kept_by(experiment.policy.recompute, experiment.policy.offload_activations),
            *(
                f"{one.plan.replicas} x TP{engine.tensor}",
                str(getattr(experiment.algorithm, "max_staleness", 0)),
            ),
            one.reason,
        )
    return result


def _lengths(experiment: Experiment, arguments: Namespace) -> Lengths:
    """Raises UsageError for responses longer than any can be."""
    assumed = default_lengths(experiment)
    prompt, response = arguments.prompt_tokens, arguments.response_tokens
    longest = experiment.policy.max_sequence_length
    prompt = assumed.prompt if prompt is None else prompt
    limit = min(experiment.generation.max_new_tokens, longest - prompt)
    if not experiment.algorithm.online or not all(
        one.has_one_turn for one in experiment.env.environments.values()
    ):
        limit = longest - prompt
    response = limit / 4 if response is None else response
    if response > limit or limit < 1:
        room = f"policy.max_sequence_length and generation.max_new_tokens leave {max(0, limit):.0f} tokens"
        raise UsageError(f"--response-tokens {response:g}: {room} after a prompt of {prompt:g}; give less")
    spread = assumed.sigma if arguments.spread is None else arguments.spread
    return replace(assumed, prompt=prompt, response=response, limit=limit, sigma=spread)


def _stages(step: StepTime, plan: RunPlan) -> Table:
    staleness = getattr(plan.experiment.algorithm, "max_staleness", 0)
    ahead = f", max_staleness {staleness}" if staleness else ""
    devices = counted(step.devices, plan.hardware.name.upper())
    if plan.hardware.name == HERE:
        devices = f"{counted(step.devices, 'device')} of this machine"
    title = f"A step on {devices}{ahead}: {_digits(step.seconds)} s"
    result = terminal.table(title, ["stage", "seconds", "bound by", "of which"])
    for name, cost in step.stages.items():
        parts = {part: seconds for part, seconds in asdict(cost).items() if seconds > 0.005 * cost.seconds}
        shares = ", ".join(
            f"{part} {seconds / cost.seconds:.0%}"
            for part, seconds in sorted(parts.items(), key=lambda item: -item[1])
        )
        result.add_row(name, _digits(cost.seconds), cost.bound, shares)
    return result


def _totals(step: StepTime, plan: RunPlan, price: float | None) -> dict[str, str]:
    rows = {
        "longest stage": f"{step.longest}, bound by {step.stages[step.longest].bound}",
        "trained tokens per second": _rate(step.tokens_per_second),
        "for each device": _rate(step.tokens_per_second / step.devices),
        "MFU of training": f"{step.training_utilization:.1%}",
        "MFU of the step": f"{step.utilization:.1%}",
    }
    rows |= {f"idle: {group}": f"{share:.0%}" for group, share in step.idle.items()}
    if price is not None:
        rows["cost of a million trained tokens"] = _digits(step.cost_per_million(price))
    return rows


def _dumped(offload: ActivationOffloadConfig | None) -> dict[str, Any] | None:
    return None if offload is None else offload.model_dump()


def _offloaded(offload: ActivationOffloadConfig | None) -> str:
    return "nothing" if offload is None else offload.described


def _as_json(choice: LayoutChoice) -> dict[str, object]:
    memory = asdict(choice.memory)
    return {
        "layout": choice.layout.model_dump(exclude_defaults=True),
        "recompute": choice.recompute.model_dump(),
        "offload_activations": _dumped(choice.offload),
        "choice": choice.reason,
        "fits": choice.fits,
        "memory": {part: memory[part] for part in MEMORY_PARTS},
        "memory_on_device": choice.memory.on_device,
        "bytes_per_token": choice.bytes_per_token,
        "idle": round(choice.idle, 4),
    }


def _table(choices: list[LayoutChoice], *, is_chosen: bool) -> Table:
    """`is_chosen`: the plan chooses what is recomputed or offloaded."""
    parts = [part for part in _PARTS if any(getattr(choice.memory, part) for choice in choices)]
    title = "Layouts on GPUs; memory of the fullest in GB: weights exact, the rest estimated"
    headers = [_SHORT.get(part, part) for part in parts]
    recomputed = ["recomputed"] if is_chosen else []
    columns = ["layout", *recomputed, "fits", "in all", *headers, "other", "kB/token", "idle"]
    result = terminal.table(title, columns)
    for column in result.columns:
        column.no_wrap = True
        column.justify = "left" if column is result.columns[0] else "right"
    for choice in choices:
        sizes = [getattr(choice.memory, part) for part in parts]
        whole = choice.memory.on_device
        fits = {True: "yes", False: "no", None: "?"}[choice.fits]
        memory = (_digits(size / 1e9) for size in (whole, *sizes, whole - sum(sizes)))
        traffic, idle = _digits(choice.bytes_per_token / 1000), f"{choice.idle:.0%}"
        names = [choice.layout.name, *(kept_by(choice.recompute, choice.offload) for _ in recomputed)]
        result.add_row(*names, fits, *memory, traffic, idle)
    return result


def _digits(number: float) -> str:
    """At least two significant digits, and one decimal: `1234.5`, `12.3`, `0.012`; `0` for none."""
    decimals = max(1, 1 - math.floor(math.log10(number))) if number > 0 else 0
    return f"{number:.{decimals}f}"


def _rate(number: float) -> str:
    """`1,234`, and below 100 as other numbers: `12.3`."""
    return f"{number:,.0f}" if number >= 100 else _digits(number)


def _numbers(text: str) -> list[int]:
    words = text.split(",")
    if not all(word.isdecimal() for word in words):
        raise ArgumentTypeError(f"{text!r}: expected integers of at least 0, separated by commas, as in 0,1")
    return sorted({int(word) for word in words})


def _rehearse(arguments: Namespace) -> int:
    experiment, shape = load_planned(arguments.config, arguments.overrides)
    policy, world = experiment.policy, experiment.policy.layout.world_size
    rates = HARDWARE["h100"]
    settled = fitting_recompute(experiment, shape, int(arguments.memory_gb * 1e9), rates)
    if settled is not experiment:
        chosen = kept_by(settled.policy.recompute, settled.policy.offload_activations)
        note = f"the memory plan chooses to recompute {chosen}, by the rates of {rates.device_name}"
        terminal.notes().print(note, markup=False)
    experiment = settled
    # After the arguments were checked: these import torch and Megatron.
    from nemorl.rehearsal.ranks import as_json, compare, faults, rehearse_all
    from nemorl.rehearsal.worker import pipeline_ranks

    ranks = arguments.ranks or pipeline_ranks(policy.layout)
    if ranks[-1] >= world:
        raise UsageError(f"--ranks: rank {ranks[-1]} does not exist, the layout has {world} ranks from 0")
    reports: list[RankReport] = []
    for rank, report in zip(ranks, rehearse_all(experiment, ranks, arguments.processes), strict=True):
        reports.append(report)
        seconds = sum(report.seconds.values())
        terminal.notes().print(f"rank {rank} of {world} rehearsed in {seconds:.0f} s", markup=False)
    found = [fault for report in reports for fault in faults(report)]
    if arguments.json:
        say(json.dumps(as_json(reports, experiment), indent=2))
    else:
        console = terminal.output()
        console.width = max(console.width, 130)
        console.print(_peaks([compare(report, experiment) for report in reports], arguments.memory_gb))
        _say_waits(reports)
        _say_offload(experiment, reports)
        if on_host := max(report.activations_on_host for report in reports):
            say(f"\nOffloaded activations take up to {on_host / 1e9:.2f} GB of a host for each rank.")
    if found:
        lines = [f"  {event.location}: {event.what}{_from(event)} ({event.phase})" for event, _ in found]
        terminal.complain("\n".join([f"{counted(len(lines), 'fault')}:", *dict.fromkeys(lines)]))
        return ExitCode.FAILED
    return ExitCode.WELL


def _peaks(rows: "list[Comparison]", memory_gb: float) -> Table:
    parts = [part for part in _REHEARSED if any(part in row.parts for row in rows)]
    title = (
        "Peak of each rank in GB, next to the memory plan; on a pretended accelerator, not run on hardware"
    )
    headers = [
        "rank",
        "stage",
        "peaks in",
        "GB",
        "plan",
        "plan is",
        "fits",
        *(p.replace("_", " ") for p in parts),
    ]
    result = terminal.table(title, headers)
    for column in result.columns[3:]:
        column.justify = "right"
    for row in rows:
        sizes = [f"{row.parts.get(part, (0, 0))[0] / 1e9:.2f}" for part in parts]
        result.add_row(
            *(str(row.rank), str(row.stage), row.phase),
            *(f"{row.measured / 1e9:.2f}", f"{row.planned / 1e9:.2f}", f"{row.difference:+.1%}"),
            *("yes" if row.measured <= memory_gb * 1e9 else "no", *sizes),
        )
    return result


def _say_waits(reports: "list[RankReport]") -> None:
    from nemorl.rehearsal.ranks import known_wait

    waits: dict[tuple[str, str, str], int] = {}
    for report in reports:
        for event, count in report.synchronizations:
            if known := known_wait(event):
                where = "in each micro-batch" if event.in_micro_batch else "once in a call"
                key = (event.phase, where, f"{event.location}: {known.reason}")
                waits[key] = max(waits.get(key, 0), count)
    say("\nWaits of the host for the device:")
    for (phase, where, reason), count in sorted(waits.items()):
        say(f"  {phase:<9} {count:>5}  {where:<20}{reason}")


def _say_offload(experiment: Experiment, reports: "list[RankReport]") -> None:
    offload = experiment.policy.offload
    if offload.weights or offload.optimizer:
        left = max(report.left for report in reports)
        say(f"\nWhile the policy is offloaded, a device keeps up to {left / 1e9:.2f} GB of it.")


def _from(event: "Event") -> str:
    return f", called from {event.called_from}" if event.called_from else ""
