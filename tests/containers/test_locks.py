"""The locks of the images against pyproject.toml."""

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tests.containers.dockerfiles import CONTAINERS, ROOT, Dockerfile, versions

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
BASE, VLLM, BUILD = versions("base.txt"), versions("vllm.txt"), versions("build.txt")


def requirements(*extras: str) -> list[Requirement]:
    """The dependencies of nemorl, and those of its extras."""
    lines = list(PROJECT["project"]["dependencies"])
    for extra in extras:
        lines += PROJECT["project"]["optional-dependencies"][extra]
    return [Requirement(line) for line in lines]


@pytest.mark.parametrize(
    ("lock", "extras"),
    [(BASE, ["trackers", "data"]), (VLLM, ["trackers", "data", "vllm"])],
    ids=["base", "vllm"],
)
def test_a_lock_has_every_dependency_in_a_version_that_nemorl_takes(
    lock: dict[str, str], extras: list[str]
) -> None:
    for requirement in requirements(*extras):
        version = lock[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} is locked at {version}"


def test_the_target_vllm_only_adds_to_what_its_base_has() -> None:
    assert len(BASE) < len(VLLM)
    assert BASE.items() <= VLLM.items()


def test_the_tools_that_build_wheels_are_locked() -> None:
    needed = Requirement(PROJECT["build-system"]["requires"][0])
    assert needed.specifier.contains(BUILD[needed.name])
    assert BUILD["setuptools"] == BASE["setuptools"]


@pytest.mark.parametrize("name", ["base.txt", "vllm.txt", "build.txt"])
def test_every_package_has_hashes(name: str) -> None:
    text = (CONTAINERS / "locks" / name).read_text(encoding="utf-8")
    packages = re.split(r"^(?=\S+==)", text, flags=re.MULTILINE)[1:]
    assert len(packages) == len(versions(name)) > 1
    for package in packages:
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", package), package.splitlines()[0]


def test_the_images_have_a_python_that_nemorl_takes() -> None:
    cuda = Dockerfile(CONTAINERS / "Dockerfile.cuda")
    venv = next(one.rest for one in cuda.stages["build"].instructions if "-m venv" in one.rest)
    version = re.search(r"python(3\.\d+) -m venv", venv)
    assert version is not None
    assert SpecifierSet(PROJECT["project"]["requires-python"]).contains(version[1])
    assert f"--python-version {version[1]}" in (CONTAINERS / "lock.sh").read_text(encoding="utf-8")
