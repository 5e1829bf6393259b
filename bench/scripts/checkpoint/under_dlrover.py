"""DLRover's flash checkpoint, as its documentation says. Runs in an environment that has nothing of ours."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType
from training import LOOK_S, STORAGE, Clock, Training, drop_from_cache, serve, stall_turn, timed


class Dlrover:
    def __init__(self) -> None:
        self.training, self.number = Training(), 0
        self.directory: Path = STORAGE / "dlrover"
        self.checkpointer = DdpCheckpointer(str(self.directory))

    def save(self, kind: StorageType) -> None:
        self.number += 1
        self.checkpointer.save_checkpoint(self.number, self.training.state(), storage_type=kind)

    def answer(self, what: str, question: dict[str, Any]) -> dict[str, Any]:
        kind = StorageType.DISK if question["saver"] == "dlrover-disk" else StorageType.MEMORY
        if what == "first":
            with Clock() as call:
                self.save(kind)
            return {"call_s": call.wall_s}
        memcpy_s = self.training.memcpy_s(1)
        if what == "durable":
            return {"memcpy_s": memcpy_s, "durable_s": timed(lambda: (self.save(kind), self.wait()))}
        if what == "load":
            drop_from_cache(self.directory)
            return {"memcpy_s": memcpy_s, "load_s": timed(self.load)}
        training = self.training
        wait = self.wait if kind is StorageType.DISK else lambda: None
        return stall_turn(training, training.step, lambda: self.save(kind), wait, Clock(), question["steps"])

    def wait(self) -> None:
        """Until its tracker names the last one. Its own wait_latest_checkpoint raises before there is a first."""
        tracker = self.directory / "dlrover_latest.txt"
        while not (tracker.exists() and tracker.read_text().strip() == str(self.number)):
            time.sleep(LOOK_S)

    def load(self) -> None:
        state = self.checkpointer.load_checkpoint()
        self.training.model.load_state_dict(state["model"])
        self.training.optimizer.load_state_dict(state["optimizer"])


if __name__ == "__main__":
    dist.init_process_group("gloo")
    serve("dlrover", Dlrover().answer)
    dist.destroy_process_group()
