"""What does one NVIDIA GPU compute, how fast, and with how much memory?

    python benchmarks/gpu.py [--parts parity training ...] [--minutes 9]
    python benchmarks/gpu.py --device cpu --small   tries its code; its results mean nothing

| part | question |
|---|---|
| parity | does every family compute on the GPU what it computes on a CPU, in float32 and bfloat16? |
| training | milliseconds and MFU of a GRPO step of a 1.5B model, its kernels, its memory against the plan |
| engine | decoding next to the memory's speed: the embedded engine and the policy's own network |
| refit | gigabytes a second to an engine on the same GPU, next to plain copies |
| memory | offload, checkpoint copies and optimizers in host memory |
| quantization | the quantizers on both processors, and next to modelopt's kernel |

Requires torch, megatron-core, pydantic and a few small packages, no Ray and no vLLM; `tools/gpu_wheels.sh`
collects those for a machine without a network. Each part has a process of its own and a share of the time:
one that fails or is late says so in its row, and the others run. Status 1 if a part failed or a comparison
did, 2 without a GPU. Not run on hardware so far.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import nemorl

if find_spec("nemorl.algorithms") is None:  # a checkout that is not installed: these lie at its root
    nemorl.__path__.append(str(Path(__file__).parents[1]))

from common import OUT, publish, table_of
from gpu_setting import Setting
from rich.console import Console

PARTS = {  # module and share of the time
    "parity": ("gpu_parity", 0.25),
    "training": ("gpu_training", 0.25),
    "engine": ("gpu_engine", 0.2),
    "refit": ("gpu_refit", 0.15),
    "memory": ("gpu_memory", 0.1),
    "quantization": ("gpu_quantization", 0.05),
}
NO_GPU = 2


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny models and few steps, to try the code")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all parts; a part has a share of it")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the JSON file")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)  # in the process of a part
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print(  # noqa: T201 - what a user reads
            f"No NVIDIA GPU was found by torch {torch.__version__}: run this on a machine with one, or try "
            "the code with --device cpu --small.",
            file=sys.stderr,
        )
        return NO_GPU
    if arguments.part:
        print(json.dumps(measured(arguments.part, arguments.device, arguments.small)))  # noqa: T201 - for main
        return 0
    return report(arguments)


def measured(part: str, device: Any, small: bool) -> dict[str, Any]:
    """Rows and details of a part, in this process."""
    module = importlib.import_module(PARTS[part][0])
    with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
        rows, details = module.measure(Setting(device, small, Path(folder)))
    return {"rows": rows, "details": details}


def report(arguments: argparse.Namespace) -> int:
    """Run the parts, print their tables, write all of it."""
    console = Console(width=max(160, Console().width))  # tables are wide, and a pipe counts as 80 columns
    shares = sum(PARTS[part][1] for part in arguments.parts)
    found: dict[str, Any] = {}
    for part in arguments.parts:
        seconds = 60 * arguments.minutes * PARTS[part][1] / shares
        console.print(f"{part}: at most {seconds:.0f} s ...")
        began = time.monotonic()
        found[part] = run_part(part, arguments, seconds) | {"seconds": time.monotonic() - began}
        if rows := found[part].get("rows"):
            console.print(table_of(part, rows))
        else:
            console.print(f"{part} failed: {found[part]['problem']}")
        for name, value in found[part].get("details", {}).items():
            if not isinstance(value, dict | list | tuple):
                console.print(f"  {name}: {value}")
    problems = list(problems_of(found, small=arguments.small))
    summary = [
        {"part": part, "seconds": result["seconds"], "result": result_of(result)}
        for part, result in found.items()
    ]
    setting = {"gpu": gpu_facts(arguments.device), "small": arguments.small}
    publish("gpu", {**setting, **found}, table_of("parts", summary), arguments.out)
    for problem in problems:
        console.print(problem)
    return int(bool(problems))


def run_part(part: str, arguments: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """What the process of a part prints last, or its problem."""
    command = [sys.executable, __file__, "--part", part, "--device", arguments.device]
    command += ["--small"] * arguments.small
    # New kernels are not looked up on other machines, and what the parts share is on the path.
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)  # with the processes that it started
        process.communicate()
        return {"problem": f"not done after {seconds:.0f} s"}
    if process.returncode:
        return {"problem": (errors.strip().splitlines() or ["no output"])[-1], "stderr": errors[-4000:]}
    return json.loads(output.strip().splitlines()[-1])  # type: ignore[no-any-return]


def problems_of(found: dict[str, Any], *, small: bool) -> Iterator[str]:
    """What a reader must not miss."""
    for part, result in found.items():
        if problem := result.get("problem"):
            yield f"{part}: {problem}"
        for row in result.get("rows", ()):
            if not small and "NO" in row.values():
                columns = [column for column, value in row.items() if value == "NO"]
                yield f"{part}: {next(iter(row.values()))}: {columns[0]} is NO"
        for name, value in result.get("details", {}).items():
            if value is False:
                yield f"{part}: not true: {name}"


def result_of(part: dict[str, Any]) -> str:
    return part.get("problem") or f"{len(part['rows'])} rows"


def gpu_facts(device: str) -> dict[str, Any]:
    if device == "cpu":
        return {"name": "none"}
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "gigabytes": properties.total_memory / 1e9,
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "attention": {
            name: getattr(torch.backends.cuda, f"{name}_sdp_enabled")()
            for name in ("flash", "mem_efficient", "math", "cudnn")
        },
    }


if __name__ == "__main__":
    sys.exit(main())
