"""What a replica that was killed leaves behind is removed by the next one, what a living one uses is not."""

import signal
import subprocess
import sys
from pathlib import Path

from nemorl.cluster.runtime import remove_abandoned
from nemorl.generation.vllm_engine.host import FOLDERS, remove_folder

# A process with shared memory as vLLM's have it, which only its creator would remove: of a message queue, and
# of a collective on a CPU.
REPLICA = """
import mmap, os, sys, time
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
from nemorl.cluster.runtime import hold
from nemorl.generation.vllm_engine.host import record_segments

segment = shared_memory.SharedMemory(create=True, size=4096)
resource_tracker.unregister(segment._name, "shared_memory")
with open(f"/dev/shm/vllm_dist_{segment.name}-tp:0-[0-1]-cpushm_0", "w+b") as file:
    file.truncate(4096)
    mapped = mmap.mmap(file.fileno(), 4096)
folder = Path(sys.argv[1])
lock = hold(folder)
record_segments(folder, [os.getpid()])
print(segment.name, os.path.basename(file.name), flush=True)
time.sleep(600)
"""


def test_memory_and_folder_of_a_killed_replica_are_removed_by_the_next_start(tmp_path: Path) -> None:
    folder, other = tmp_path / f"{FOLDERS}abc", tmp_path / "another"
    folder.mkdir()
    other.mkdir()
    replica = subprocess.Popen(
        [sys.executable, "-c", REPLICA, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert replica.stdout is not None
    segments = [Path("/dev/shm", name) for name in replica.stdout.readline().split()]
    try:
        assert (folder / "segments").read_text().split() == sorted(segment.name for segment in segments)
        remove_abandoned(tmp_path, FOLDERS, remove_folder)
        assert all(segment.exists() for segment in segments), "its process lives"
        assert folder.exists()
        replica.send_signal(signal.SIGKILL)
        replica.wait()
        remove_abandoned(tmp_path, FOLDERS, remove_folder)
        assert not any(segment.exists() for segment in segments)
        assert sorted(tmp_path.iterdir()) == [other]
    finally:
        replica.kill()
        replica.wait()
        for segment in segments:
            segment.unlink(missing_ok=True)


def test_only_message_queues_of_ones_own_are_removed(tmp_path: Path) -> None:
    """A record is in a folder that others may write to where folders are shared."""
    folder = tmp_path / f"{FOLDERS}abc"
    folder.mkdir()
    kept = tmp_path / "psm_kept"
    kept.touch()
    (folder / "segments").write_text(f"../..{kept}\n{kept}\nsem.other")
    remove_folder(folder)
    assert kept.exists()
    assert not folder.exists()
