"""One checkpoint holds all models that learn."""

import asyncio
import hashlib
from pathlib import Path

import pytest

from nemorl.errors import RunError
from nemorl.megatron.checkpoint_store import CheckpointStore, FileRecord, verify
from nemorl.session.handles import TrainedModels


class Model:
    """Writes one file."""

    def __init__(self, text: str) -> None:
        self.text, self.restored = text, ""

    async def save(self, folder: Path) -> list[FileRecord]:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "weights").write_text(self.text)
        digest = hashlib.sha256(self.text.encode()).hexdigest()
        return [FileRecord("weights", len(self.text), digest)]

    async def copy_for_checkpoint(self) -> None:
        self.copied = self.text

    async def write_copy(self, folder: Path) -> list[FileRecord]:
        return await Model(self.copied).save(folder)

    async def restore(self, folder: Path) -> None:
        self.restored = (folder / "weights").read_text()


@pytest.mark.parametrize("beside", [False, True], ids=["at-once", "beside-training"])
def test_policy_and_critic_are_kept_and_restored_together(tmp_path: Path, beside: bool) -> None:
    models = {"policy": Model("of the policy"), "critic": Model("of the critic")}
    trained, store = TrainedModels(models), CheckpointStore(tmp_path)

    async def keep() -> Path:
        folder = store.begin(3)
        if beside:
            await trained.copy_for_checkpoint()
            models["critic"].text = "of a later critic"
        records = await (trained.write_copy if beside else trained.save)(folder)
        return store.commit(3, {}, records)

    checkpoint = asyncio.run(keep())
    files = {file.path for file in verify(checkpoint).files}
    assert files == {"weights", "critic/weights"}
    asyncio.run(trained.restore(checkpoint))
    assert [model.restored for model in models.values()] == ["of the policy", "of the critic"]


def test_a_checkpoint_without_a_critic_is_refused(tmp_path: Path) -> None:
    asyncio.run(TrainedModels({"policy": Model("weights")}).save(tmp_path))
    models = {"policy": Model(""), "critic": Model("")}
    with pytest.raises(RunError, match=f"{tmp_path} holds no critic, as a run of another algorithm wrote it"):
        asyncio.run(TrainedModels(models).restore(tmp_path))
    assert models["policy"].restored == ""
