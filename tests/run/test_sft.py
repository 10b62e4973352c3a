"""A run that samples nothing, and what can be done with its weights."""

from pathlib import Path

import yaml

from tests.run.runs import finish, known_figures, lines, start, tiny_model, write_experiment


def test_sft_learns_and_its_weights_can_be_used(tmp_path: Path) -> None:
    sft = {"name": "sft", "num_steps": 12, "batch_size": 16, "validation": {"at_end": True}}
    layout = {"pipeline_parallel_size": 2}
    config = write_experiment(
        tmp_path,
        tiny_model(tmp_path / "model"),
        "sft",
        checkpointing={"save_hf": True, "export_hf": True, "period": 12},
    )
    tree = yaml.safe_load(config.read_text())
    tree["algorithm"], tree["policy"]["layout"] = sft, layout
    config.write_text(yaml.safe_dump(tree))
    status, output = finish(start("train", config))
    assert status == 0, output
    steps = lines(tmp_path / "sft")
    assert steps[-1].values["loss/sft"] < 0.8 * steps[0].values["loss/sft"]
    assert {name for s in steps for name in s.values} <= known_figures(tmp_path / "sft")
    exported = tmp_path / "exported"
    status, output = finish(
        start("models", "export", tmp_path / "sft" / "checkpoints" / "step_00000012", exported)
    )
    assert status == 0, output
    weights = (exported / "model.safetensors").read_bytes()
    assert weights == (tmp_path / "sft" / "hf" / "model.safetensors").read_bytes()
    for folder in (exported, tmp_path / "sft" / "hf"):
        assert "trained with nemorl by sft" in (folder / "README.md").read_text()
        assert (folder / "curves.svg").exists()
    checkpoint = tmp_path / "sft" / "checkpoints" / "step_00000012"
    assert weights == (checkpoint / "hf" / "model.safetensors").read_bytes()

    status, output = finish(start("eval", config, f"policy.model_path={exported}"))
    assert status == 0, output
    assert f"{steps[-1].values['validation/reward']:.6g}" in output
    assert f"model: {exported} (step 12 of {tmp_path / 'sft'})" in output
