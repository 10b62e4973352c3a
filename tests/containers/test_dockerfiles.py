"""What can be said of the images without an engine that builds them."""

import fnmatch
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.containers.dockerfiles import CONTAINERS, ROOT, Dockerfile, versions

CUDA, NGC = Dockerfile(CONTAINERS / "Dockerfile.cuda"), Dockerfile(CONTAINERS / "Dockerfile.ngc")
TARGETS = [(CUDA, "nemorl"), (CUDA, "vllm"), (NGC, "nemorl"), (NGC, "vllm"), (NGC, "trtllm")]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
target_of_each = pytest.mark.parametrize(
    ("file", "target"), TARGETS, ids=["cuda", "cuda-vllm", "ngc", "ngc-vllm", "ngc-trtllm"]
)
each_file = pytest.mark.parametrize("file", [CUDA, NGC], ids=["cuda", "ngc"])


def program(name: str) -> str:
    """Of this environment or the system; the test is skipped where it is not installed."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def test_hadolint_has_nothing_to_say() -> None:
    files = sorted(CONTAINERS.glob("Dockerfile.*"))
    assert len(files) == 2
    lint = subprocess.run([program("hadolint"), "--no-color", *files], capture_output=True, text=True)
    assert (lint.returncode, lint.stdout) == (0, "")


def test_shellcheck_has_nothing_to_say() -> None:
    scripts = [*sorted(CONTAINERS.glob("*.sh")), ROOT / "slurm" / "nemorl.sbatch"]
    lint = subprocess.run([program("shellcheck"), *scripts], capture_output=True, text=True)
    assert (lint.returncode, lint.stdout) == (0, "")


@each_file
def test_the_default_target_is_nemorl_and_the_head_says_that_nothing_was_built(file: Dockerfile) -> None:
    assert file.last == "nemorl"
    head = file.text.partition("\n\n")[0]
    assert "not built for this release" in " ".join(head.replace("#", " ").split())


@target_of_each
def test_a_target_does_not_run_as_root(file: Dockerfile, target: str) -> None:
    users = file.all_of(target, "USER")
    assert users[-1].rest == "10001:10001"
    assert file.stages[target].instructions[-1] == users[-1]
    assert "ID=10001" in (CONTAINERS / "system.sh").read_text(encoding="utf-8")


@target_of_each
def test_a_target_runs_nemorl_and_asks_doctor_for_its_health(file: Dockerfile, target: str) -> None:
    assert file.all_of(target, "ENTRYPOINT")[-1].words[-1] == "nemorl"
    check = file.all_of(target, "HEALTHCHECK")[-1].rest
    assert check.endswith('CMD ["nemorl", "doctor", "--brief"]')
    assert re.search(r"--interval=\d+m ", check)


@target_of_each
def test_a_target_says_what_it_is(file: Dockerfile, target: str) -> None:
    labels = " ".join(label.rest for label in file.all_of(target, "LABEL"))
    for key in ("title", "description", "licenses", "version", "revision", "created", "base.name"):
        assert f"org.opencontainers.image.{key}=" in labels
    assert f"VERSION={PROJECT['project']['version']}" in [one.rest for one in file.all_of(target, "ARG")]
    assert f'licenses="{PROJECT["project"]["license"]}"' in labels


@target_of_each
def test_images_are_pinned(file: Dockerfile, target: str) -> None:
    image = file.image(target)
    name, _, tag = image.partition(":")
    assert re.match(r"[0-9][\w.+-]*", tag), f"{name} has no version"
    # Of TensorRT-LLM's image the digest is not known; the file says so.
    assert re.search(r"@sha256:[0-9a-f]{64}$", image) or target == "trtllm"


@target_of_each
def test_the_source_comes_after_all_packages(file: Dockerfile, target: str) -> None:
    """So that a change of the source leaves the large layers as they are."""
    chain = [one for stage in file.chain(target) for one in stage.instructions]
    installs = [n for n, one in enumerate(chain) if one.word == "RUN" and "pip install" in one.rest]
    copies = [n for n, one in enumerate(chain) if one.word == "COPY" and "--from=packages" in one.rest]
    of_wheel = [n for n in installs if "from=wheel," in chain[n].rest]
    assert of_wheel == [max(installs + copies)]
    sources = [one.rest.split()[0] for one in chain if one.word == "COPY" and "--from" not in one.rest]
    assert not {"nemorl", "algorithms", "environments", "slurm"} & set(sources)


@each_file
def test_the_wheel_is_made_of_every_folder_of_packages(file: Dockerfile) -> None:
    setup = PROJECT["tool"]["setuptools"]
    mapped = setup["package-dir"]
    folders = {mapped.get(".".join(name.split(".")[:2]), name.split(".")[0]) for name in setup["packages"]}
    copied = {one.rest.split()[0] for one in file.stages["wheel"].instructions if one.word == "COPY"}
    assert folders <= copied
    readme, licenses = PROJECT["project"]["readme"], PROJECT["project"]["license-files"]
    everything = " ".join(one.rest for one in file.stages["wheel"].instructions if one.word == "COPY")
    assert {"pyproject.toml", readme, *licenses} <= set(everything.split())


@each_file
def test_whatever_is_copied_is_there_and_goes_to_the_builder(file: Dockerfile) -> None:
    kept = [
        line[1:]
        for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
        if line.startswith("!")
    ]
    for stage in file.stages.values():
        for one in stage.instructions:
            sources = one.rest.split()[:-1] if one.word == "COPY" and "--from" not in one.rest else []
            sources += re.findall(r"type=bind,source=(\S+?),", one.rest)
            for source in sources:
                assert (ROOT / source).exists(), f"{source} of {one.word} {one.rest}"
                assert any(fnmatch.fnmatch(source, f"{entry}*") for entry in kept), source
            for earlier in re.findall(
                r"(?:--from|from)=([\w-]+)", one.rest if one.word in ("COPY", "RUN") else ""
            ):
                assert earlier in file.stages


@each_file
def test_nothing_secret_is_built_in(file: Dockerfile) -> None:
    for stage in file.stages.values():
        for one in stage.instructions:
            if one.word in ("ARG", "ENV"):
                assert not re.search(r"TOKEN|SECRET|PASSWORD|CREDENTIAL|API_KEY", one.rest)


def test_the_cuda_of_the_image_is_that_of_torch() -> None:
    of_torch = versions("base.txt")["cuda-toolkit"].split(".")[:2]
    of_image = CUDA.image("nemorl").partition(":")[2].split(".")[:2]
    assert of_image == of_torch
    compiler = next(one.rest for one in CUDA.stages["vllm"].instructions if "cuda-nvcc" in one.rest)
    assert f"cuda-nvcc-{'-'.join(of_torch)} " in compiler


def test_vllm_is_the_same_for_both_torch_builds() -> None:
    wheel = " ".join(one.rest for one in NGC.stages["vllm-wheel"].instructions)
    assert re.findall(r"vllm==([\d.]+)", wheel) == [versions("vllm.txt")["vllm"]]
    assert f"VLLM_VERSION_OVERRIDE={versions('vllm.txt')['vllm']}" in wheel


@pytest.mark.parametrize("target", ["nemorl", "vllm", "trtllm"])
def test_nothing_replaces_the_torch_of_nvidias_image(target: str) -> None:
    for one in NGC.all_of(target, "RUN"):
        # Either pip resolves within the constraints, and what it did is looked at, or it resolves nothing.
        if "pip install" in one.rest and "--constraint" in one.rest:
            assert one.rest.rstrip().endswith("image_packages.py unchanged constraints.txt")
        elif "pip install" in one.rest:
            assert "--no-deps" in one.rest


def test_the_image_of_tensorrt_llm_is_one_that_its_back_end_is_written_for() -> None:
    version = NGC.image("trtllm").rpartition(":")[2]
    assert tuple(map(int, re.findall(r"\d+", version)[:2])) >= (1, 3)  # docs/trtllm.md
