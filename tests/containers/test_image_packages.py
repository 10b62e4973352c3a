"""Install nemorl into an image without replacing its torch."""

from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from containers import image_packages
from tests.containers.dockerfiles import CONTAINERS, ROOT

TORCH = "2.14.0a0+b2c75dd062.nv26.9.68203377"
IMAGE = {
    "torch": TORCH,
    "transformer-engine": "2.19.0",
    "numpy": "2.1.0",
    "rich": "16.0",
    "jupyterlab": "4.4",
}
LOCK = {"torch": "2.13.0", "torchaudio": "2.11.0", "numpy": "2.3.5", "rich": "15.0.0", "ray": "2.60.0"}


def test_what_the_image_has_stays_and_the_lock_says_the_rest() -> None:
    assert image_packages.constraints(IMAGE, LOCK) == [
        "jupyterlab==4.4",
        "numpy>=2.1.0,<=2.3.5",
        "ray==2.60.0  # not in the image",
        "rich>=15.0.0,<=16.0",
        f"torch=={TORCH}",
        "torchaudio==2.11.0  # not in the image",
        "transformer-engine==2.19.0",
    ]


def test_the_lines_are_such_that_pip_takes_the_images_torch() -> None:
    [line] = [one for one in image_packages.constraints(IMAGE, LOCK) if one.startswith("torch==")]
    assert Requirement(line).specifier.contains(TORCH, prereleases=True)
    assert not Requirement(line).specifier.contains("2.14.0")


def test_an_alpha_of_a_newer_torch_will_do_and_an_alpha_of_the_oldest_will_not() -> None:
    required = [Requirement("torch>=2.13"), Requirement("numpy>=3")]
    assert image_packages.refused({"torch": TORCH}, required) == []
    assert image_packages.refused({"torch": "2.13.0a0+nv"}, required) == [
        "the image has torch 2.13.0a0+nv, but nemorl needs torch>=2.13"
    ]
    assert image_packages.refused({}, required) == [
        "the image has torch (none), but nemorl needs torch>=2.13"
    ]


def test_torch_is_not_required() -> None:
    required = image_packages.read_requirements(ROOT / "pyproject.toml", ["trackers"])
    names = {Requirement(line).name for line in image_packages.requirements(required, ["pebble"])}
    assert {"megatron-core", "ray", "tensorboard"} <= names
    assert not {"torch", "pebble"} & names


def test_the_requirements_of_vllm_lose_what_is_built_for_another_torch() -> None:
    names = ("torch==2.13.0", "torchvision", "nvidia-cutlass-dsl[cu13]==4.8.0", "torchcodec", "numba")
    left = image_packages.requirements([Requirement(name) for name in names], ["torchcodec"])
    assert list(left) == ["nvidia-cutlass-dsl[cu13]==4.8.0", "numba"]


def test_a_replaced_torch_is_named() -> None:
    before = "\n".join(image_packages.constraints(IMAGE, LOCK))
    assert image_packages.changed(IMAGE | {"numpy": "2.3.5"}, before) == []
    assert image_packages.changed(IMAGE | {"torch": "2.13.0"}, before) == [f"torch was {TORCH} and is 2.13.0"]
    without = {name: version for name, version in IMAGE.items() if name != "transformer-engine"}
    assert image_packages.changed(without, before) == ["transformer-engine was 2.19.0 and is missing"]


def test_a_lock_is_read_with_its_hashes() -> None:
    lock = image_packages.read_lock((CONTAINERS / "locks" / "vllm.txt").read_text(encoding="utf-8"))
    assert lock["vllm"] == "0.32.0"
    assert all(SpecifierSet(f"=={version}") for version in lock.values())


def test_the_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run the commands of the Dockerfile with the packages of this environment."""

    def run(*words: str | Path) -> str:
        monkeypatch.setattr("sys.argv", ["image_packages.py", *map(str, words)])
        image_packages.main()
        return capsys.readouterr().out

    lines = run("constraints", CONTAINERS / "locks" / "vllm.txt")
    assert "vllm==0.32.0  # not in the image" in lines.splitlines()
    constraints = tmp_path / "constraints.txt"
    constraints.write_text(lines)
    assert run("unchanged", constraints) == ""
    constraints.write_text("torch==1.0\n")
    with pytest.raises(SystemExit, match=r"replaced .* torch was 1.0 and is 2\."):
        run("unchanged", constraints)
    assert "ray[default]" in run("requirements", ROOT / "pyproject.toml")
    assert "pyyaml" in run("requirements", "transformers", "--without", "numpy").lower()
