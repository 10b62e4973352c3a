"""A driver of its own, for a test with several nodes: keeps the policy's state in memory, and finds it again
after a node was lost. Compares what it found with a checkpoint on disk from the same copy."""

import asyncio
import json
import sys
from pathlib import Path

from nemorl.config.load import load_experiment
from nemorl.megatron.checkpoint_store import CheckpointStore, verify
from nemorl.observe.run_folder import RunPaths
from nemorl.run.memory import MemoryCheckpoints
from nemorl.session.session import open_session

STEP = 3


def say(**content: object) -> None:
    sys.stdout.write(json.dumps(content) + "\n")
    sys.stdout.flush()


async def main(config: Path) -> None:
    experiment = load_experiment(config)
    RunPaths(experiment.run_dir).checkpoints.mkdir(parents=True)
    async with open_session(experiment, policy=True, sampling=False) as session:
        memory = MemoryCheckpoints(experiment, session, None)
        trained, store = session.trained, CheckpointStore(experiment.run_dir / "checkpoints")
        await trained.copy_for_checkpoint()
        for step in (STEP - 1, STEP):
            await memory.save(step, json.dumps({"step": step}), {}, trained.write_copy)
        records = await trained.write_copy(store.begin(STEP))
        store.commit(STEP, {}, records)
        say(nodes=[node.name for node in session.trained_nodes])
        sys.stdin.readline()  # a node is lost
        while not session.lost_node(["policy"]):  # as far as Ray knows
            await asyncio.sleep(0.2)
        await session.restart_models(await session.lost_models())
        say(nodes=[node.name for node in session.trained_nodes])
        state = await memory.newest()
        assert state is not None
        assert isinstance(state.folder, dict)
        (folder,) = state.folder.values()
        ours = {path.name for path in folder.iterdir()} - {"manifest.json", "driver.json"}
        on_disk = store.path(STEP)
        same = [
            (folder / f.path).read_bytes() == (on_disk / f.path).read_bytes() for f in verify(on_disk).files
        ]
        say(
            step=state.step,
            progress=state.progress,
            same=all(same),
            files=len(same),
            more=len(ours) - len(same),
        )


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
