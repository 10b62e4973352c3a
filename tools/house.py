"""Measure the structure of the product code: size, coupling, cycles, the GRPO path, the cost of an extension.

    python tools/house.py [--json] [--path] [--root FOLDER] [--limit grpo_path_files=45 ...]

Everything is read from the source; nothing of the product is imported. `--help` defines each metric, `--path`
lists the modules on the GRPO path with a reason each, and `--limit` exits with 1 where a metric is larger.
"""

import argparse
import ast
import io
import json
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from statistics import median
from typing import TypeAlias

from call_graph import CallGraph, Step, matches

# Folders of the product and the packages that they are imported as.
FOLDERS = {
    "nemorl": "nemorl",
    "algorithms": "nemorl.algorithms",
    "environments": "nemorl.environments",
    "slurm": "nemorl.slurm",
}

# The GRPO path. Functions are written `Class.method` or `function`, after `module:` where that is not unique,
# so that moving a module needs no edit here. ROOTS are where one step enters a process or a thread.
ROOTS = (
    "OnlineAlgorithm.step",  # the driver
    "GroupRunner.run_more",  # the rollout worker and its turn loop
    "TorchHost._run",  # the engine's loop
    "PolicyWorker.load_trajectories",  # the policy's name for it is put together at run time
)
# Classes whose methods the driver calls by their names as strings.
HOSTED = ("PolicyWorker", "WeightSender", "TorchHost", "RayRolloutWorker")
# Of an interface or base class with several implementations, the one that this step uses; "" for none.
CHOSEN = {
    "Update": "PolicyGradientUpdate",
    "OnlineBase": "OnlineConfig",
    "Loss": "PolicyLoss",
    "UpdateLoss": "PolicyLoss",
    "CandidateLoss": "",
    "TokenEstimator": "",
    "EnvironmentFactory": "SingleTurnFactory",
    "Environment": "SingleTurnEnvironment",
    "Prompts": "ChatPrompts",
    "scored:Scorer": "FunctionReward",
    "Generator": "Router",
    "GroupRunner": "RolloutWorker",
    "EngineFront": "TorchHost",
    "PolicyWorker": "PolicyWorker",
    "Venue": "SocketVenue",
    "Receiver": "WeightReceiver",
    "SendingChannel": "SocketSender",
    "ReceivingChannel": "SocketReceiver",
    "Loader": "",
    "StageListener": "PlainConsole",
}
# What this step does not take, with the reason. A pattern that matches nothing has no effect.
STOPS = {
    "after the step: records, checkpoints, validation": (
        *(
            "RunRecorder",
            "OnlineAlgorithm._store",
            "Observer.trajectories",
            "PolicyWorker._keep",
            "ModelWork",
            "stage_range",
        ),
    ),
    "a process that died": (
        *("Supervisor", "ReplicaSupervisor", "RolloutSupervisor"),
        *("resolve_error", "describe_activity", "WorkerGroup.kill", "WorkerGroup._silent"),
        *("ModelHandle.restart", "WorkerGroup.has_lost_node", "WorkerGroup.lost_one"),
    ),
    "an agent that owns its loop": ("EpisodeLoop",),
    "several environments": ("ByTaskEnvConfig",),
    "models that share devices": ("DeviceScheduler",),
    "a simulated run": ("SimulatedWorker", "SimulatedGroup", "SimulatedRolloutWorker", "SimulatedEngine"),
    "a critic": (
        "PolicyWorker.estimate",
        "PolicyWorker.share",
        "PolicyWorker.take",
        "value_metrics",
        "ScalarHead",
    ),
    "a teacher": ("Teachers", "TeacherCalls", "PolicyWorker.fill"),
    "a policy that generates its samples": ("DecodingCopy", "LeaderCache", "LeadingRunner"),
    "a function of the user's": ("own_advantages", "custom:custom_loss"),
    "other advantages": ("turn_relative", "reinforce", "group_then_batch", "gdpo"),
    "a limit of the trajectories in flight": ("ConcurrencyControl", "Places"),
    "trajectories in files": ("ReplayedGroups", "TrajectoryLog"),
    "adapters": ("Adapters",),
    "quantization": ("FakeQuantization", "InputRanges"),
    "a model with experts": ("Routers",),
    "a head for drafts": ("DraftTraining",),
    "tools of the environment": ("ToolFormat", "Tokenizer.max_calls"),
    "rewards of steps": ("StepRewards", "with_step_rewards"),
    "an entropy bonus": ("EntropyWeight",),
    "CUDA graphs": ("DecodeGraphs",),
    "draft tokens": (
        *("PromptLookup", "ModelDrafts", "DraftModel", "StepCost"),
        *("_MtpSequence", "MtpDrafts", "MtpRunner"),
    ),
    "other losses": ("clip_cov", "kl_cov", "gmpo", "gspo", "gspo_token", "least_entropy", "choose"),
    "other transports": (
        *("file_sender", "FileVenue", "StoredVersion", "LastSent", "delta:apply"),
        *("group_sender", "group_receiver", "GroupVenue", "DeviceSlots"),
    ),
}
# The packages of the engine, of the weights' way to it, and of the model families.
INNER = ("generation", "weights", "models")

# The package of configs of other projects, which names what these have; an extension is no reason to edit it.
TRANSLATIONS = "importing"

# Kinds of extension and existing examples of each, by the names they have in code. An example's own files are
# those whose path has its name.
EXTENSIONS = {
    "loss": ("sapo", "cispo", "gmpo", "clip_cov"),
    "environment": ("chained_sums",),
    "engine": ("trtllm",),  # vllm is also a server, whose protocols for rewards and teachers are supported
    "optimizer": ("muon",),
    "model_family": ("gpt_oss", "gemma3"),
    "metric": ("clip_fraction", "tokens_kept"),
}

DEFINITIONS = {
    "files": "Python files of nemorl/, algorithms/, environments/ and slurm/",
    "modules": "those files without __init__.py",
    "lines": "all their lines",
    "code_lines": "lines without blank lines, comments, decorators, docstrings and other statements that are "
    "a string alone, and imports at the top level of a module",
    "functions": "function definitions, nested ones and methods too",
    "function_median_lines": "median of their lines, from `def` to the last one, docstring included",
    "classes": "class definitions",
    "module_median_lines": "median lines of a module",
    "single_importer_modules": "modules that at most one other file imports, anywhere in its text",
    "single_importer_lines": "their lines",
    "private_functions": "functions and methods whose name begins with one underscore",
    "private_functions_used_once": "those to which their file refers in exactly one place",
    "package_cycles": "groups of packages, each a folder of nemorl/ or a file in it, that import each other "
    "directly or around a circle",
    "packages_in_cycles": "packages in such groups",
    "module_cycles": "the same of files",
    "modules_in_cycles": "files in such groups",
    "grpo_path_files": "files with a function that one plain GRPO step may execute, found statically along "
    "calls from ROOTS with the types of annotations; constructors, `raise` statements, exception handlers "
    "and STOPS are not entered",
    "grpo_path_lines": "all lines of those files",
    "grpo_path_outer_files": "those outside of the packages generation, weights and models",
}
for _kind in EXTENSIONS:
    DEFINITIONS[f"edits_for_{_kind}"] = (
        f"existing files, other than its own, whose code names an existing {_kind}; the largest of "
        + ", ".join(EXTENSIONS[_kind])
    )

Metrics: TypeAlias = dict[str, float]
Graph: TypeAlias = Mapping[str, set[str]]
_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
_LAYOUT = (
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
)


@dataclass(frozen=True, eq=False)
class Module:
    """A file of the product."""

    name: str  # as it is imported; a package's is the one of its __init__.py
    path: Path  # below the repository
    source: str
    tree: ast.Module

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the tree."""
        return list(ast.walk(self.tree))

    @cached_property
    def imports(self) -> list[tuple[str, str, str]]:
        """Each import as (local name, module, name in it), the last one empty for a whole module."""
        found: list[tuple[str, str, str]] = []
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found += [(alias.asname or alias.name, alias.name, "") for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                up = self.package.split(".")[: 1 - node.level or None] if node.level else []
                base = ".".join((*up, *([node.module] if node.module else [])))
                found += [(alias.asname or alias.name, base, alias.name) for alias in node.names]
        return found

    @property
    def is_package(self) -> bool:
        """True for an __init__.py."""
        return self.path.name == "__init__.py"

    @property
    def package(self) -> str:
        """The package it belongs to."""
        return self.name if self.is_package else self.name.rpartition(".")[0]

    @property
    def lines(self) -> int:
        """Number of lines."""
        return len(self.source.splitlines())


def read_modules(root: Path) -> dict[str, Module]:
    """Return the product's files below `root` by module name."""
    modules = {}
    for folder, package in FOLDERS.items():
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root / folder).with_suffix("").parts
            name = ".".join((package, *(part for part in parts if part != "__init__")))
            source = path.read_text(encoding="utf-8")
            modules[name] = Module(name, path.relative_to(root), source, ast.parse(source))
    return modules


def code_lines(module: Module) -> int:
    """Number of lines of code, by the definition of `code_lines`."""
    left_out: set[int] = set()
    for node in module.nodes:
        is_import = isinstance(node, ast.Import | ast.ImportFrom) and node.col_offset == 0
        if isinstance(node, ast.stmt) and (is_import or _is_text(node)):
            left_out |= _span(node)
        for decorator in getattr(node, "decorator_list", ()):
            left_out |= _span(decorator)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(module.source).readline):
        if token.type not in _LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - left_out)


def _is_text(node: ast.AST) -> bool:
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def _span(node: ast.stmt | ast.expr) -> set[int]:
    return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))


def import_graph(modules: Mapping[str, Module]) -> dict[str, set[str]]:
    """Return the files of the product that each of them imports."""
    graph: dict[str, set[str]] = {}
    for name, module in modules.items():
        graph[name] = set()
        for _, base, what in module.imports:
            target = f"{base}.{what}" if f"{base}.{what}" in modules else base
            if target in modules and target != name:
                graph[name].add(target)
    return graph


def cycles(graph: Graph) -> list[set[str]]:
    """Return the groups of more than one node that reach each other."""
    reached = {node: _reachable(graph, node) for node in graph}
    groups = {frozenset(other for other in reached[node] if node in reached[other]) for node in graph}
    return sorted((set(group) for group in groups if len(group) > 1), key=sorted)


def _reachable(graph: Graph, start: str) -> set[str]:
    seen: set[str] = set()
    left = [start]
    while left:
        for node in graph[left.pop()] - seen:
            seen.add(node)
            left.append(node)
    return seen


def package_graph(graph: Graph) -> dict[str, set[str]]:
    """Return the packages that each package imports."""
    packages: dict[str, set[str]] = defaultdict(set)
    for name, others in graph.items():
        packages[top_package(name)] |= {top_package(other) for other in others} - {top_package(name)}
    return packages


def top_package(name: str) -> str:
    """Return the part of a module's name below `nemorl`."""
    return name.split(".")[1] if "." in name else name


def private_functions(module: Module) -> list[int]:
    """Return, for each private function, how many places of its file refer to it."""
    references: Counter[str] = Counter()
    for node in module.nodes:
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            references[node.id if isinstance(node, ast.Name) else node.attr] += 1
    names = (node.name for node in module.nodes if isinstance(node, _FUNCTION))
    return [references[name] for name in names if re.match(r"_[^_]", name)]


def edits(modules: Iterable[Module], examples: Sequence[str]) -> int:
    """Return the most files, other than an example's own, whose code has its name, in any case.

    Those of TRANSLATIONS do not count.
    """
    counts = dict.fromkeys(examples, 0)
    for module in modules:
        if top_package(module.name) == TRANSLATIONS:
            continue
        words = named_in_code(module)
        for example in examples:
            is_own = example in module.path.as_posix()
            counts[example] += not is_own and any(example.replace("_", "") in word for word in words)
    return max(counts.values())


@cache
def named_in_code(module: Module) -> frozenset[str]:
    """Return identifiers and strings, without docstrings, in lower case without underscores."""
    documentation = {id(node.value) for node in module.nodes if isinstance(node, ast.Expr)}
    words: set[str] = set()
    for node in module.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            words.add(node.value)
        for field in ("id", "attr", "name", "module", "arg", "asname"):
            if isinstance(word := getattr(node, field, None), str):
                words.add(word)
    return frozenset(word.lower().replace("_", "") for word in words)


def grpo_path(modules: Mapping[str, Module]) -> dict[str, Step]:
    """Return the files on the GRPO path with the first step into each. Raises LookupError without a root."""
    steps: dict[str, Step] = {}
    for step in step_graph(modules).walk(ROOTS):
        steps.setdefault(step.module, step)
    return steps


def step_graph(modules: Mapping[str, Module]) -> CallGraph:
    """Return the call graph of one GRPO step."""
    return CallGraph(
        {name: module.tree for name, module in modules.items()},
        {name: module.imports for name, module in modules.items()},
        CHOSEN,
        HOSTED,
        [pattern for patterns in STOPS.values() for pattern in patterns],
    )


def stale(modules: Mapping[str, Module]) -> list[str]:
    """Return the names in the tables that nothing has, so that a rename is noticed."""
    stops = [pattern for patterns in STOPS.values() for pattern in patterns]
    names = [*ROOTS, *HOSTED, *CHOSEN, *filter(None, CHOSEN.values()), *stops]
    keys = step_graph(modules).definitions()
    words = " ".join(word for module in modules.values() for word in named_in_code(module))
    examples = [example for several in EXTENSIONS.values() for example in several]
    return [
        *sorted({name for name in names if not any(matches(name, key) for key in keys)}),
        *(example for example in examples if example.replace("_", "") not in words),
    ]


def is_inner(name: str) -> bool:
    """True for a module of the engine, the weights or the models."""
    return top_package(name) in INNER


def measure(root: Path) -> Metrics:
    """Return all metrics of DEFINITIONS for the product below `root`."""
    files = read_modules(root)
    modules = [module for module in files.values() if not module.is_package]
    graph = import_graph(files)
    importers = Counter(target for targets in graph.values() for target in targets)
    single = [module for module in modules if importers[module.name] <= 1]
    nodes = [node for module in files.values() for node in module.nodes]
    functions = [len(_span(node)) for node in nodes if isinstance(node, _FUNCTION)]
    private = [places for module in files.values() for places in private_functions(module)]
    package_cycles, module_cycles = cycles(package_graph(graph)), cycles(graph)
    path = grpo_path(files)
    metrics: Metrics = {
        "files": len(files),
        "modules": len(modules),
        "lines": sum(module.lines for module in files.values()),
        "code_lines": sum(map(code_lines, files.values())),
        "functions": len(functions),
        "function_median_lines": median(functions),
        "classes": sum(isinstance(node, ast.ClassDef) for node in nodes),
        "module_median_lines": median(module.lines for module in modules),
        "single_importer_modules": len(single),
        "single_importer_lines": sum(module.lines for module in single),
        "private_functions": len(private),
        "private_functions_used_once": private.count(1),
        "package_cycles": len(package_cycles),
        "packages_in_cycles": sum(map(len, package_cycles)),
        "module_cycles": len(module_cycles),
        "modules_in_cycles": sum(map(len, module_cycles)),
        "grpo_path_files": len(path),
        "grpo_path_lines": sum(files[name].lines for name in path),
        "grpo_path_outer_files": sum(not is_inner(name) for name in path),
    }
    for kind, examples in EXTENSIONS.items():
        metrics[f"edits_for_{kind}"] = edits(files.values(), examples)
    return metrics


def over_limit(metrics: Mapping[str, float], limits: Mapping[str, float]) -> list[str]:
    """Return a sentence for each metric that is larger than its limit."""
    return [
        f"{name} = {metrics[name]:g}: larger than {limit:g}"
        for name, limit in limits.items()
        if metrics[name] > limit
    ]


def table(metrics: Metrics) -> str:
    """Return the metrics as lines of a name, a number and the definition."""
    return "\n".join(f"{name:<29}{metrics[name]:>9,g}  {DEFINITIONS[name]}" for name in metrics)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the metrics; 1 if one is over its limit."""
    definitions = "\n".join(f"  {name}: {text}" for name, text in DEFINITIONS.items())
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"metrics:\n{definitions}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--root", type=Path, default=Path(__file__).parents[1], help="folder of the repository"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--path", action="store_true", help="print the files on the GRPO path and their callers"
    )
    parser.add_argument(
        "--limit", nargs="*", default=[], metavar="METRIC=NUMBER", help="fail above this number"
    )
    options = parser.parse_args(arguments)
    if options.path:
        for name, step in sorted(grpo_path(read_modules(options.root)).items()):
            caller = ":".join(step.caller) if step.caller else "a root"
            side = "inner" if is_inner(name) else "outer"
            sys.stdout.write(f"{side}  {name}  {step.function[1]}  from {caller}\n")
        return 0
    metrics = measure(options.root)
    sys.stdout.write((json.dumps(metrics, indent=2) if options.json else table(metrics)) + "\n")
    limits = {}
    for limit in options.limit:
        name, _, number = limit.partition("=")
        if name not in metrics:
            parser.error(f"--limit {limit}: unknown metric; expected one of {', '.join(metrics)}")
        limits[name] = float(number)
    problems = over_limit(metrics, limits)
    sys.stderr.writelines(f"{problem}\n" for problem in problems)
    return bool(problems)


if __name__ == "__main__":
    raise SystemExit(main())
