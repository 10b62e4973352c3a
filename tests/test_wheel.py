"""nemorl as a wheel installs it, in an environment and a folder without this repository."""

import json
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urljoin
from urllib.request import urlopen

import pytest

from nemorl.config import shipped
from nemorl.ui.app import SCREENS

pytestmark = pytest.mark.ci
ROOT = Path(__file__).parents[1]
# Where the packages of the wheel are in the repository.
TREES = {
    "": "nemorl",
    **{part: part for part in ("algorithms", "environments", "slurm", "configs", "examples")},
}
NOT_SHIPPED = {"examples/nemo_gym"}  # a server for NeMo-Gym's own repository

Nemorl = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, because a build leaves folders in the tree that later builds would read."""
    source = tmp_path_factory.mktemp("source")
    for name in (*TREES.values(), "pyproject.toml", "README.md", "LICENSE"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", source / "dist", source)
    (built,) = (source / "dist").glob("*.whl")
    return built


def pip(*words: object) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *map(str, words)]
    subprocess.run(command, check=True, timeout=120)


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the wheel installed. The dependencies are those of this environment."""
    environment = tmp_path_factory.mktemp("installed") / "environment"
    venv.create(environment, symlinks=True)
    python = environment / "bin" / "python"
    # Of a folder in a .pth file, its own .pth files, such as that of this repository, are not read.
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n", encoding="utf-8")
    pip("--python", python, "install", "--no-deps", "--no-index", "--ignore-installed", wheel)
    return environment


@pytest.fixture(scope="module")
def nemorl(environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Nemorl:
    """Run the installed command in an empty folder."""
    place = tmp_path_factory.mktemp("place")

    def run(*words: object, status: int = 0) -> subprocess.CompletedProcess[str]:
        command = [str(environment / "bin" / "nemorl"), *map(str, words)]
        done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=300)
        assert done.returncode == status, done.stdout + done.stderr
        return done

    return run


def test_it_has_every_file_of_the_packages(wheel: Path) -> None:
    expected = set()
    for package, folder in TREES.items():
        for file in (ROOT / folder).rglob("*"):
            relative = file.relative_to(ROOT / folder)
            is_left_out = any(file.is_relative_to(ROOT / path) for path in NOT_SHIPPED)
            if file.is_file() and not is_left_out and "__pycache__" not in file.parts:
                expected.add((Path("nemorl") / package / relative).as_posix())
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert packed == expected


def test_the_shipped_experiments_are_listed_and_checked_by_name(nemorl: Nemorl) -> None:
    listed = json.loads(nemorl("recipes", "list", "--json").stdout)
    assert [recipe["name"] for recipe in listed] == [recipe.name for recipe in shipped.recipes()]

    outcome = nemorl("check", "quickstart/grpo", status=2)
    file = "site-packages/nemorl/configs/quickstart/grpo.yaml:6"
    assert "policy.model_path = runs/quickstart/sft/hf" in outcome.stderr
    assert file in outcome.stderr
    assert "there is no such folder; `nemorl train quickstart/sft` writes it" in outcome.stderr


def test_experiments_whose_functions_are_in_the_examples_are_checked(nemorl: Nemorl) -> None:
    nemorl("models", "create", "chat", "models/chat")
    done = nemorl("check", "tools/sft", "tools/grpo", "policy.model_path=models/chat")
    assert "tools/grpo: OK" in done.stdout


def test_the_web_app_serves_its_pages(nemorl: Nemorl, environment: Path) -> None:
    """Every script that a screen imports, from the installed package alone."""
    process = subprocess.Popen(
        [environment / "bin" / "nemorl", "ui", "--no-browser"],
        cwd=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().partition("/#")[0]
        left, seen = {f"{url}/static/main.js", *(f"{url}/static/screens/{s}.js" for s in SCREENS)}, set[str]()
        while left:
            one = left.pop()
            seen.add(one)
            with urlopen(one) as answer:
                text = answer.read().decode()
            if "/vendor/" not in one:
                found = re.findall(r'from\s*"(\.[^"]+)"', text)
                left |= {urljoin(one, path) for path in found} - seen
    finally:
        process.terminate()
        process.wait(60)
    assert len(seen) > 15


def test_a_copy_trains(nemorl: Nemorl) -> None:
    nemorl("models", "create", "arithmetic", "models/arithmetic")
    nemorl("recipes", "copy", "quickstart/grpo", "mine.yaml")
    few = ("num_steps=2", "num_prompts_per_step=4", "validation={}")
    words = [f"algorithm.{field}" for field in few]
    model = "policy.model_path=models/arithmetic"
    done = nemorl("train", "mine.yaml", model, "policy.layout.tensor_parallel_size=1", *words)
    assert "step 2/2" in done.stdout + done.stderr
    assert "run: runs/quickstart/grpo" in done.stdout
