"""Install nemorl into an image of NVIDIA without replacing its torch.

    image_packages.py constraints LOCK    print versions for pip's --constraint
    image_packages.py requirements PYPROJECT|DISTRIBUTION [--extra E…] [--without NAME…]    print requirements
    image_packages.py unchanged CONSTRAINTS    fail if pip replaced torch or a package built for it

Such an image has its own builds of torch, Transformer Engine, apex and their CUDA libraries, in versions
that no index has: these stay (`TORCH_PACKAGES`). Packages that the image lacks are installed in the version
of the lock. Any other package of the image stays if its version is compatible; otherwise it gets the version
closest to the lock's that the others allow. Requires `packaging`, which every image has.
"""

import argparse
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

TORCH_PACKAGES = (
    *("torch", "torchvision", "torchaudio", "torch-tensorrt", "torchao", "triton", "pytorch-triton"),
    *("transformer-engine*", "apex", "flash-attn*", "tensorrt*", "cuda-toolkit"),
    # CUDA's libraries, which the image has without pip.
    *("nvidia-cublas*", "nvidia-cuda-*", "nvidia-cudnn-cu*", "nvidia-cuf*", "nvidia-curand*", "nvidia-cus*"),
    *("nvidia-nccl*", "nvidia-nvjitlink*", "nvidia-nvshmem*", "nvidia-nvtx*"),
)

ABSENT = "  # not in the image"


def is_torch_package(name: str) -> bool:
    """Return True if a package was built with or for the image's torch."""
    return any(fnmatch(name, pattern) for pattern in TORCH_PACKAGES)


def read_lock(text: str) -> dict[str, str]:
    """Return versions by name, from the lines `name==version` of a lock or of constraints."""
    pairs = re.findall(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", text, re.MULTILINE)
    return {canonicalize_name(name): version for name, version in pairs}


def read_requirements(pyproject: Path, extras: Sequence[str] = ()) -> list[Requirement]:
    """Return the dependencies in a pyproject.toml, including those of the extras."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *(x for e in extras for x in project["optional-dependencies"][e])]
    return [Requirement(line) for line in lines]


def requirements_of(distribution: str) -> list[Requirement]:
    """Return the requirements of an installed package without its extras."""
    all_requirements = [Requirement(line) for line in metadata.requires(distribution) or ()]
    return [one for one in all_requirements if one.marker is None or one.marker.evaluate({"extra": ""})]


def installed_versions() -> dict[str, str]:
    """Return the versions of this interpreter's packages, if pip can compare them."""
    versions: dict[str, str] = {}
    for distribution in metadata.distributions():
        try:
            Version(distribution.version)
        except (InvalidVersion, TypeError):
            continue
        versions.setdefault(str(canonicalize_name(distribution.metadata["Name"])), distribution.version)
    return versions


def constraints(installed: Mapping[str, str], lock: Mapping[str, str]) -> list[str]:
    """Return a line for every package. pip keeps an installed version within the bounds of its line."""
    lines = []
    for name, version in installed.items():
        if is_torch_package(name) or name not in lock:
            lines.append(f"{name}=={version}")
        else:
            low, high = sorted((Version(version), Version(lock[name])))
            lines.append(f"{name}>={low.public},<={high}")
    lacking = (name for name in lock if name not in installed)
    return sorted([*lines, *(f"{name}=={lock[name]}{ABSENT}" for name in lacking)])


def refused(installed: Mapping[str, str], required: Sequence[Requirement]) -> list[str]:
    """Return a sentence for each requirement that the image's torch packages do not meet."""
    return [
        f"the image has {name} {installed.get(name, '(none)')}, but nemorl needs {requirement}"
        for requirement in required
        # A build such as 2.14.0a0+nv26.9 counts as 2.14.0a0, which is newer than 2.13.
        if is_torch_package(name := str(canonicalize_name(requirement.name)))
        and not requirement.specifier.contains(installed.get(name, "0"), prereleases=True)
    ]


def requirements(required: Sequence[Requirement], without: Sequence[str]) -> Iterator[str]:
    """Yield the requirements for pip, without torch packages and the names in `without`."""
    excluded = {canonicalize_name(name) for name in without}
    for requirement in required:
        name = canonicalize_name(requirement.name)
        if not is_torch_package(name) and name not in excluded:
            yield str(requirement)


def changed(installed: Mapping[str, str], before: str) -> list[str]:
    """Return a sentence for each torch package whose version differs from the constraints `before`."""
    had = read_lock("\n".join(line for line in before.splitlines() if not line.endswith(ABSENT)))
    return [
        f"{name} was {version} and is {installed.get(name, 'missing')}"
        for name, version in had.items()
        if is_torch_package(name) and installed.get(name) != version
    ]


def main() -> None:
    """Run one of the three commands."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("constraints").add_argument("lock", type=Path)
    listing = commands.add_parser("requirements")
    listing.add_argument("of")
    listing.add_argument("--extra", nargs="*", default=[])
    listing.add_argument("--without", nargs="*", default=[])
    commands.add_parser("unchanged").add_argument("constraints", type=Path)
    arguments = parser.parse_args()
    installed = installed_versions()
    if arguments.command == "constraints":
        lines = constraints(installed, read_lock(arguments.lock.read_text()))
    elif arguments.command == "requirements" and Path(arguments.of).suffix == ".toml":
        required = read_requirements(Path(arguments.of), arguments.extra)
        if problems := refused(installed, required):
            raise SystemExit("Use another image: " + "; ".join(problems))
        lines = list(requirements(required, arguments.without))
    elif arguments.command == "requirements":
        lines = list(requirements(requirements_of(arguments.of), arguments.without))
    elif problems := changed(installed, arguments.constraints.read_text()):
        raise SystemExit("pip replaced packages of the image's torch: " + "; ".join(problems))
    else:
        return
    sys.stdout.writelines(f"{line}\n" for line in lines)


if __name__ == "__main__":
    main()
