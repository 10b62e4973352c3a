"""Where remote methods are named as strings, and that the hosted classes have them."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
HANDLES = {  # of the driver, and of the rollout workers, which call actors of environments themselves
    ROOT / "nemorl" / "session" / "handles.py",
    ROOT / "nemorl" / "rollout" / "remote_environments.py",
}
CALLS = {"call", "call_pair", "send", "ask", "stream"}  # of workers and groups; all name a stage
LOCAL = {"_call", "_forward", "_checkpoint"}  # of the handles
# Folders and modules of the hosted classes.
HOSTED = (
    "megatron",
    "generation",
    "rollout/worker.py",
    "run/memory.py",
    "weights/endpoints.py",
    "session/endpoints.py",
    "serve/environment_sessions.py",
)


def remote_methods(path: Path, calls: set[str]) -> set[str]:
    """The strings that calls of these names begin with."""
    return {
        node.args[0].value
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in calls
        and node.args
        and isinstance(node.args[0], ast.Constant)
        and isinstance(node.args[0].value, str)
        and (node.func.attr in LOCAL or any(keyword.arg == "stage" for keyword in node.keywords))
    }


def test_no_other_module_names_remote_methods() -> None:
    folders = ("nemorl", "algorithms", "environments", "slurm")
    modules = [path for folder in folders for path in (ROOT / folder).rglob("*.py") if path not in HANDLES]
    assert len(modules) > 100
    assert {str(path): found for path in modules if (found := remote_methods(path, CALLS))} == {}


def test_every_method_that_a_handle_names_is_one_of_a_hosted_class() -> None:
    named = {name for path in HANDLES for name in remote_methods(path, CALLS | LOCAL)}
    assert {"train", "compute_values", "generate_batches", "sender.send", "run_more", "listen"} <= named
    places = [ROOT / "nemorl" / place for place in HOSTED]
    modules = [path for place in places for path in ([place] if place.is_file() else place.rglob("*.py"))]
    methods = {
        function.name
        for path in modules
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
        for function in node.body
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name.rpartition(".")[2] for name in named} - methods == set()
