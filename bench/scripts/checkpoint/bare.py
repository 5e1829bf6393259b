"""A plain process: hf.Checkpointer and what torch has, in turns; raw speeds of memory and disk; restoring."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from training import SIZE_BYTES, STORAGE, TURNS, Clock, Training, drop_from_cache, serve, stall_turn, timed

import holdfast as hf
from holdfast.core.shard_map import ShardMap
from holdfast.snapshots.slot_file import SlotPage, map_image
from holdfast.state.tracked import Tracked
from holdfast.storage.checkpoint_catalogue import CheckpointCatalogue
from holdfast.storage.checkpoint_writer import CheckpointWriter
from holdfast.storage.manifest import CheckpointInfo
from holdfast.storage.stores import open_store
from holdfast.util.blocks import block_checksums, pack_checksums
from holdfast.wire.worker_messages import StoredImage
from holdfast.worker.collectives import small_collectives
from holdfast.worker.restore import from_checkpoints, from_snapshots

BLOCK = 8 * 2**20


class Saver:
    """One way to save."""

    def __init__(self, training: Training, directory: Path) -> None:
        self.training, self.directory, self.step = training, directory, 0
        self.waited = Clock()
        directory.mkdir(parents=True, exist_ok=True)

    def save(self) -> None:
        raise NotImplementedError

    def wait(self) -> None:
        """Until it is durable."""

    def before_update(self) -> None:
        """The update is about to change what may not be copied yet."""

    def load(self) -> None:
        raise NotImplementedError

    def fresh(self) -> Path:
        """Where the next one goes; of the ones before, the last stays."""
        self.step += 1
        for old in self.directory.iterdir():
            if old.name not in (str(self.step - 1), f"{self.step - 1}.pt"):
                shutil.rmtree(old) if old.is_dir() else old.unlink()
        return self.directory / str(self.step)


class Ours(Saver):
    def __init__(self, training: Training, directory: Path) -> None:
        super().__init__(training, directory)
        self.checkpoints = hf.Checkpointer(directory, keep="last:1")
        self.objects = {"model": training.model, "optimizer": training.optimizer}

    def save(self) -> None:
        self.step += 1
        self.checkpoints.save(self.step, **self.objects)
        if self.step == 1:  # measured where it waits: its own hook came first
            joining = self.checkpoints._snapshots.join

            def join(optimizer: Any) -> None:
                with self.waited:
                    joining(optimizer)

            self.checkpoints._snapshots.join = join

    def wait(self) -> None:
        self.checkpoints.wait()

    def load(self) -> None:
        self.checkpoints.load(**self.objects)


class TorchSave(Saver):
    def save(self) -> None:
        path = self.fresh().with_suffix(".pt")
        with path.open("wb") as file:
            torch.save(self.training.state(), file)
            file.flush()
            os.fsync(file.fileno())

    def load(self) -> None:
        state = torch.load(self.directory / f"{self.step}.pt", weights_only=True)
        self.training.model.load_state_dict(state["model"])
        self.training.optimizer.load_state_dict(state["optimizer"])


class Dcp(Saver):
    def save(self) -> None:
        dcp.save(self.training.state(), checkpoint_id=self.fresh())

    def load(self) -> None:
        state = self.training.state()
        dcp.load(state, checkpoint_id=self.directory / str(self.step))
        self.training.model.load_state_dict(state["model"])
        self.training.optimizer.load_state_dict(state["optimizer"])


class DcpAsync(Dcp):
    kind = AsyncCheckpointerType.THREAD

    def __init__(self, training: Training, directory: Path) -> None:
        super().__init__(training, directory)
        try:
            self.stager = DefaultStager(StagingOptions(False, True, True, False))
        except Exception:  # asynchronous staging may want a device
            self.stager = DefaultStager(StagingOptions(False, True, False, False))
        self.response: Any = None

    def save(self) -> None:
        self.wait()
        self.response = dcp.async_save(
            self.training.state(),
            checkpoint_id=self.fresh(),
            async_checkpointer_type=self.kind,
            async_stager=self.stager,
        )

    def before_update(self) -> None:
        if isinstance(self.response, AsyncSaveResponse):
            self.response.staging_completion.result()

    def wait(self) -> None:
        if self.response is not None:
            response, self.response = self.response, None
            (response.upload_completion if isinstance(response, AsyncSaveResponse) else response).result()


class DcpProcess(DcpAsync):
    kind = AsyncCheckpointerType.PROCESS


SAVERS: dict[str, type[Saver]] = {
    "checkpointer": Ours,
    "torch.save": TorchSave,
    "dcp.save": Dcp,
    "dcp.async-thread": DcpAsync,
    "dcp.async-process": DcpProcess,
}


class Bare:
    def __init__(self) -> None:
        self.training = Training()
        self.savers: dict[str, Saver] = {}
        self.unrehearsed: set[str] = set()
        """Those that have not saved since somebody's load has given the optimizer other tensors."""

    def answer(self, what: str, question: dict[str, Any]) -> dict[str, Any]:
        if what in ("raw", "persist", "restore"):
            return getattr(self, what)()
        saver = self.saver(question["saver"])
        if what == "first":
            with Clock() as call:
                saver.save()
                saver.before_update()
            saver.wait()
            return {"call_s": call.wall_s}
        if what == "durable":
            memcpy_s = self.training.memcpy_s(1)
            return {"memcpy_s": memcpy_s, "durable_s": timed(lambda: (saver.save(), saver.wait()))}
        if what == "load":
            drop_from_cache(saver.directory)
            memcpy_s = self.training.memcpy_s(1)
            self.unrehearsed = set(self.savers)
            return {"memcpy_s": memcpy_s, "load_s": timed(saver.load)}
        if question["saver"] in self.unrehearsed:
            self.unrehearsed.discard(question["saver"])
            self.rehearse(saver)
        return self.stall(saver, question["steps"])

    def saver(self, name: str) -> Saver:
        if name not in self.savers:
            self.savers[name] = SAVERS[name](self.training, STORAGE / name)
        return self.savers[name]

    def rehearse(self, saver: Saver) -> None:
        """As often as there are slots: what is measured is a save like the one before."""
        for _ in range(2):
            saver.save()
            saver.before_update()
            self.training.step()
            saver.wait()

    def stall(self, saver: Saver, steps: int) -> dict[str, float]:
        def before_update() -> None:
            with saver.waited:
                saver.before_update()

        training = self.training
        training.before_update = before_update
        try:
            found = stall_turn(training, training.step, saver.save, saver.wait, saver.waited, steps)
        finally:
            training.before_update = lambda: None
        return found | {"size_bytes": training.size_bytes}

    # --- ours against the raw speed of what it goes to

    def image(self) -> tuple[SlotPage, int]:
        """The newest image in memory of the Checkpointer."""
        ours = self.saver("checkpointer")
        if ours.step == 0:
            ours.save()
            ours.wait()
        page = ours.checkpoints._host._page
        return page, max(page.sealed(), key=lambda slot: page.record(slot).image.step)

    def raw(self) -> dict[str, Any]:
        return {"memcpy_s": self.training.memcpy_s(1), "memcpy_2_s": self.training.memcpy_s(2)}

    def persist(self) -> dict[str, Any]:
        """The same bytes: written raw by one thread and by two, and as a checkpoint."""
        page, slot = self.image()
        record, directory = page.record(slot), STORAGE / "persist"
        memory = map_image(page.path(slot), record.image.size_bytes, is_writable=False)
        with memoryview(memory) as image:
            _touch(image)
            raw = {f"raw_write_{threads}_s": _raw_write(image, STORAGE / "raw", threads) for threads in (1, 2)}
            about = CheckpointInfo(step=1, world_size=1, shards=1, created_unix_s=1.0)
            shutil.rmtree(directory, ignore_errors=True)
            began_at = time.perf_counter()
            with CheckpointWriter(open_store(str(directory)), about, "bench") as writing:
                writing.write_part(0, image)
                writing.publish()
            took_s = time.perf_counter() - began_at
        memory.close()
        return raw | {"persist_s": took_s, "size_bytes": record.image.size_bytes}

    def restore(self) -> dict[str, Any]:
        """From shared memory as a worker does, and from the disk, cold."""
        training = self.training
        tracked = Tracked(model=training.model, optimizer=training.optimizer)
        page, slot = self.image()
        record = page.record(slot)
        memory = map_image(page.path(slot), record.image.size_bytes, is_writable=False)
        with memoryview(memory) as image:
            checksums = pack_checksums(block_checksums(image))
        memory.close()
        found = {"memcpy_s": training.memcpy_s(1), "memcpy_2_s": training.memcpy_s(2)}
        with tempfile.TemporaryDirectory(dir="/dev/shm") as shared:  # files, as an agent has: these here are links
            for file in page.directory.iterdir():
                shutil.copyfile(file, Path(shared) / file.name)
            path = str(Path(shared) / page.path(slot).name)
            held = StoredImage(path=path, info=msgspec.structs.replace(record.image, checksums=checksums))

            def recall() -> None:
                memory = from_snapshots.SnapshotRestore([held], 0, 1, ShardMap(), tracked, small_collectives.outside())
                assert memory.load(0) is not None

            found["recall_s"] = timed(recall)
        directory = STORAGE / "persist"
        stored = CheckpointCatalogue(open_store(str(directory))).open(1)
        drop_from_cache(directory)
        found["raw_read_1_s"] = timed(lambda: _raw_read(directory / "step-1" / stored.manifest.parts[0].file, 1))
        drop_from_cache(directory)
        found["raw_read_2_s"] = timed(lambda: _raw_read(directory / "step-1" / stored.manifest.parts[0].file, 2))
        drop_from_cache(directory)
        found["load_cold_s"] = timed(lambda: from_checkpoints.load(stored, tracked, ShardMap(), 0))
        found["load_warm_s"] = timed(lambda: from_checkpoints.load(stored, tracked, ShardMap(), 0))
        return found


def _touch(image: memoryview) -> None:
    """Have its pages mapped, for everybody alike."""
    block_checksums(image)


def _in_blocks(size: int, threads: int, move: Callable[[int, int], object]) -> None:
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda start: move(start, min(BLOCK, size - start)), range(0, size, BLOCK)))


def _raw_write(image: memoryview, path: Path, threads: int) -> float:
    """Past the page cache, in large blocks, allocated before, durable: the best a disk does."""
    path.unlink(missing_ok=True)
    began_at = time.perf_counter()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
    os.posix_fallocate(descriptor, 0, len(image))
    _in_blocks(len(image), threads, lambda start, size: os.pwrite(descriptor, image[start : start + size], start))
    os.fdatasync(descriptor)
    os.close(descriptor)
    took_s = time.perf_counter() - began_at
    path.unlink()
    return took_s


def _raw_read(path: Path, threads: int) -> None:
    """Block by block, each thread into one room that it uses again."""
    descriptor = os.open(path, os.O_RDONLY)
    rooms = [bytearray(BLOCK) for _ in range(threads)]

    def move(start: int, size: int) -> None:
        room = rooms.pop()
        os.preadv(descriptor, [memoryview(room)[:size]], start)
        rooms.append(room)

    _in_blocks(os.fstat(descriptor).st_size, threads, move)
    os.close(descriptor)


if __name__ == "__main__":
    assert SIZE_BYTES
    dist.init_process_group("gloo", init_method=f"file://{TURNS}/store", rank=0, world_size=1)
    serve("bare", Bare().answer)
    dist.destroy_process_group()
