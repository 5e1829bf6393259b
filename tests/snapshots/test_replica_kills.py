"""kill -9 of the sender and of the holder, at any moment: there is always a whole image, of one step, and verified."""

from __future__ import annotations

import random
import signal
from pathlib import Path

from holdfast.snapshots.replica_store import ReplicaStore
from support.bulk_process import started, tell, word
from support.replica_process import content_of
from support.slot_records import checksums_of

PROCESS = Path(__file__).parents[1] / "support" / "replica_process.py"
KILLS = 5
SEED = 11


def newest(root: Path) -> tuple[int, int]:
    """The newest that is held; all that are held are what they say."""
    held = ReplicaStore(root).images()
    assert held, "nothing is left"
    for one in held:
        content = one.path.read_bytes()
        assert content == content_of(one.info.view, one.info.step), "bytes of two steps"
        assert checksums_of(content) == one.info.checksums
    return max(one.info.version for one in held)


def test_holders_that_are_killed(tmp_path: Path) -> None:
    chance, safe = random.Random(SEED), 0
    with started(PROCESS, "send", str(tmp_path / "own"), "1") as sender:
        for _ in range(KILLS):
            with started(PROCESS, "hold", str(tmp_path / "replicas")) as holder:
                tell(sender, f"127.0.0.1 {word(holder, 'port')}")
                for _ in range(chance.randrange(1, 5)):
                    safe = int(word(sender, "safe"))
                holder.send_signal(signal.SIGKILL)
                holder.wait()
            assert newest(tmp_path / "replicas") >= (1, safe), "what was said to be safe is"


def test_senders_that_are_killed(tmp_path: Path) -> None:
    chance = random.Random(SEED)
    with started(PROCESS, "hold", str(tmp_path / "replicas")) as holder:
        port = word(holder, "port")
        for view in range(1, KILLS + 1):
            with started(PROCESS, "send", str(tmp_path / "own"), str(view)) as sender:
                tell(sender, f"127.0.0.1 {port}")
                safe = [int(word(sender, "safe")) for _ in range(chance.randrange(1, 5))][-1]
                sender.send_signal(signal.SIGKILL)
                sender.wait()
            assert newest(tmp_path / "replicas") >= (view, safe)
