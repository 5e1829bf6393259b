"""Streamed shards: every record once per epoch, whatever breaks; what cannot be read is listed."""

import json
import os
import subprocess
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.data.formats import Shard
from holdfast.data.shard_catalogue import RECORDS_BITS
from holdfast.errors import ShardError, UsageError
from support.jobs import free_port


def write_shards(directory: Path, sizes: list[int]) -> list[Path]:
    """Line r of shard s says "s r"."""
    paths = []
    for number, size in enumerate(sizes):
        paths.append(directory / f"{number:03}.txt")
        paths[-1].write_text("".join(f"{number} {record}\n" for record in range(size)))
    return paths


def every(sizes: list[int]) -> Counter[Any]:
    return Counter(f"{shard} {record}" for shard, size in enumerate(sizes) for record in range(size))


def drain(stream: hf.Stream, steps_max: int = 10_000) -> list[list[str]]:
    """The batches of the steps that are left, each committed."""
    found = []
    for batch in stream:
        found.append(batch)
        stream.commit()
        if len(found) >= steps_max:
            break
    return found


class World:
    """Several ranks in one process, in step. A fault is what the session makes of it: all go back to the state before
    the step, some are gone, others are new."""

    def __init__(self, make: Callable[..., hf.Stream], ranks: int) -> None:
        self._make = make
        self.streams: list[hf.Stream] = []
        self.resize(ranks)

    def resize(self, ranks: int) -> None:
        """Survivors are told their place; newcomers get a survivor's state, as they would from a peer."""
        state = self.streams[0].state_dict() if self.streams else None
        self.streams = self.streams[:ranks]
        self._meeting = Meeting(ranks)
        for rank in range(len(self.streams), ranks):
            newcomer = self._make(rank=rank, world_size=ranks, agree=lambda values: self._meeting.agree(values))
            if state is not None:
                newcomer.load_state_dict(json.loads(json.dumps(state)))
            self.streams.append(newcomer)
        for rank, stream in enumerate(self.streams):
            stream.set_assignment(rank, ranks)

    def lose(self, rank: int, ranks: int) -> None:
        """One dies; the others close up, to so many."""
        if len(self.streams) > 1:
            del self.streams[rank % len(self.streams)]
        self.resize(ranks)

    def draw(self) -> list[tuple[float, list[str]]]:
        """What each batch of a step on any rank has, and its scale."""
        found: list[tuple[float, list[str]]] = []
        errors: list[BaseException] = []

        def work(stream: hf.Stream) -> None:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    found.extend((stream.loss_scale, batch) for batch in stream.step_batches())
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(stream,)) for stream in self.streams]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return found

    def commit(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for stream in self.streams:
                stream.commit_drawn()
        assert all(stream.state_dict() == self.streams[0].state_dict() for stream in self.streams)

    def break_off(self) -> None:
        for stream in self.streams:
            stream.load_state_dict(stream.state_dict())


class Meeting:
    """The maximum over the ranks of one view."""

    def __init__(self, ranks: int) -> None:
        self._values: list[list[int]] = []
        self._result: list[int] = []
        self._barrier = threading.Barrier(ranks, action=self._combine)

    def _combine(self) -> None:
        self._result = [max(column) for column in zip(*self._values, strict=True)]
        self._values = []

    def agree(self, values: list[int]) -> list[int]:
        self._values.append(values)
        self._barrier.wait(20)
        return list(self._result)


def steps_of(world: World, steps: int) -> list[list[str]]:
    found = []
    for _ in range(steps):
        found.append(sorted(record for _, batch in world.draw() for record in batch))
        world.commit()
    return found


def test_steps_are_full_as_long_as_there_are_shards(tmp_path: Path) -> None:
    stream = hf.Stream(write_shards(tmp_path, [5, 0, 17, 3, 9, 1]), global_batch_size=7, slots=3)
    assert {len(batch) for batch in drain(stream, 60)} == {7}
    assert stream.epoch > 8


def test_alone_it_reads_every_record_once_an_epoch(tmp_path: Path) -> None:
    sizes = [5, 0, 17, 3, 9, 1]
    stream = hf.Stream(write_shards(tmp_path, sizes), global_batch_size=4, epochs=3)
    batches = drain(stream)
    assert Counter(r for batch in batches for r in batch) == Counter(dict.fromkeys(every(sizes), 3))
    assert stream.quarantined == []
    with pytest.raises(UsageError, match="used up after"):
        next(stream.step_batches())


def test_short_steps_end_each_epoch(tmp_path: Path) -> None:
    sizes = [5, 8, 3]
    stream = hf.Stream(write_shards(tmp_path, sizes), global_batch_size=6, slots=2, epochs=2, last_batch="short")
    for epoch in range(2):
        assert stream.epoch == epoch
        assert Counter(r for batch in drain(stream) for r in batch) == every(sizes)


def test_ranges_of_a_large_file_are_shards(tmp_path: Path) -> None:
    path = write_shards(tmp_path, [500])[0]
    stream = hf.Stream(path, global_batch_size=8, epochs=1, split_bytes=200)
    assert stream.rules.shards > 10
    assert Counter(r for batch in drain(stream) for r in batch) == every([500])


def test_what_a_rank_goes_on_reading_in_a_new_view_is_not_opened_again(tmp_path: Path) -> None:
    """Nor for a step that is repeated."""
    paths = write_shards(tmp_path, [40] * 8)
    opened: list[list[str]] = []

    def make(**place: Any) -> Any:
        own: list[str] = []
        opened.append(own)

        def read(shard: Shard, first: int) -> Iterator[Any]:
            own.append(shard.path)
            yield from Path(shard.path).read_text().splitlines()[first:]

        return hf.Stream(paths, global_batch_size=8, slots=4, format=read, collate_fn=list, threads=0, **place)

    world = World(make, 3)
    found = steps_of(world, 2)
    world.draw()
    world.lose(2, 2)
    found += steps_of(world, 2)
    world.draw()
    world.resize(1)
    found += steps_of(world, 2)
    assert found == steps_of(World(make, 1), 6)
    assert max(Counter(opened[0]).values()) == 1


def test_it_goes_on_from_a_state_at_another_world_size(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, [7, 20, 11, 4])
    whole = drain(hf.Stream(paths, global_batch_size=6, slots=3, epochs=2))
    first = hf.Stream(paths, global_batch_size=6, slots=3, epochs=2)
    begun = drain(first, 5)
    state = json.loads(json.dumps(first.state_dict()))

    def resumed(**place: Any) -> hf.Stream:
        stream = hf.Stream(paths, global_batch_size=6, slots=3, epochs=2, threads=0, **place)
        stream.load_state_dict(state)
        return stream

    world = World(resumed, 2)
    assert [sorted(b) for b in begun] + steps_of(world, 5) == [sorted(batch) for batch in whole[:10]]


def test_a_commit_that_is_taken_back_is_as_if_it_had_not_been(tmp_path: Path) -> None:
    """A session with replicas commits before its barrier, and goes back if the barrier breaks."""
    stream = hf.Stream(write_shards(tmp_path, [7, 20, 11, 4]), global_batch_size=6, slots=3, threads=0)
    begun = drain(stream, 3)
    before = stream.state_dict()
    stream.take_news()
    batches = list(stream.step_batches())
    stream.commit_drawn()
    stream.commit_drawn()
    assert stream.step == len(begun) + 1
    stream.load_state_dict(before)
    assert list(stream.step_batches()) == batches
    leases, _ = stream.take_news()
    assert {lease.number for lease in leases} == {held[0] for leases in before["book"]["held"] for held in leases}


RANK = """
import sys
import torch.distributed as dist
import holdfast as hf
dist.init_process_group("gloo")
stream = hf.Stream(sys.argv[1], global_batch_size=6, slots=4, epochs=1)
for batch in stream:
    for record in batch if stream.loss_scale else []:
        print(record)
    stream.commit()
dist.destroy_process_group()
"""


def test_ranks_of_another_launcher_agree_among_themselves(tmp_path: Path) -> None:
    sizes = [7, 20, 11, 4, 30]
    write_shards(tmp_path, sizes)
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "3", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RANK, str(tmp_path / "*.txt")]
    ranks = [
        subprocess.Popen(command, env=os.environ | meeting | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(3)
    ]
    outputs = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0]
    assert Counter(line for output in outputs for line in output.splitlines()) == every(sizes)
    assert all(outputs)


def test_the_mean_over_all_ranks_is_that_over_all_records(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, [7, 2, 11, 4])
    world = World(lambda **place: hf.Stream(paths, global_batch_size=5, slots=3, epochs=1, threads=0, **place), 4)
    sizes = []
    while True:
        try:
            batches = world.draw()
        except UsageError:
            break
        real = [(scale, batch) for scale, batch in batches if scale > 0]
        total = sum(len(batch) for _, batch in real)
        assert [scale for scale, _ in real] == [pytest.approx(len(batch) * 4 / total) for _, batch in real]
        assert len(batches) >= 4, "every rank has a batch, be it a ghost"
        sizes.append(total)
        world.commit()
    assert sum(sizes) == 24


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(0, 15), min_size=1, max_size=7).filter(any),
    slots=st.integers(1, 5),
    across=st.booleans(),
    faults=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.integers(1, 4)), max_size=6),
)
def test_kills_and_resizes_change_nothing(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], slots: int, across: bool, faults: Any
) -> None:
    """Each fault: (step, what, number). The same steps as undisturbed, and every record once an epoch."""
    paths = write_shards(tmp_path_factory.mktemp("shards"), sizes)
    wanted: dict[str, Any] = {
        "global_batch_size": 6,
        "slots": slots,
        "epochs": 2,
        "last_batch": "across" if across else "short",
    }
    undisturbed = hf.Stream(paths, **wanted, threads=0)
    whole = []
    while batches := drain(undisturbed):
        whole += batches
    world = World(lambda **place: hf.Stream(paths, **wanted, threads=0, **place), 2)
    found: list[Any] = []
    left = list(faults)
    while len(found) < len(whole):
        step = sorted(record for scale, batch in world.draw() if scale for record in batch)
        fault = next((fault for fault in left if fault[0] == len(found)), None)
        if fault is None:
            world.commit()
            found.append(step)
            continue
        left.remove(fault)
        match fault[1]:
            case 0:
                world.break_off()
            case 1:
                world.break_off()
                world.lose(fault[2], max(len(world.streams) - 1, 1))
            case 2:
                world.break_off()
                world.lose(fault[2], fault[2])
            case 3:
                world.commit()
                found.append(step)
                world.resize(fault[2])
    assert found == [sorted(batch) for batch in whole]
    assert Counter(record for batch in found for record in batch) == Counter(dict.fromkeys(every(sizes), 2))


class Fragile:
    """Lines of shards, some of which cannot be read at times: {(shard, record): how often it still fails}."""

    def __init__(self, failing: dict[tuple[int, int], int]) -> None:
        self.failing = failing

    def __call__(self, shard: Shard, first: int) -> Iterator[Any]:
        number = int(Path(shard.path).stem)
        for record, line in enumerate(Path(shard.path).read_text().splitlines()):
            if record < first:
                continue
            if self.failing.get((number, record), 0) > 0:
                self.failing[(number, record)] -= 1
                raise OSError(f"record {record} of shard {number}")
            yield line


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(sizes=[1, 1, 1, 2], slots=2, across=False, failing={(3, 0): 4, (3, 1): 8}, faults=[])  # lost at the very end
@given(
    sizes=st.lists(st.integers(1, 12), min_size=2, max_size=6),
    slots=st.integers(1, 4),
    across=st.booleans(),
    failing=st.dictionaries(st.tuples(st.integers(0, 5), st.integers(0, 11)), st.integers(1, 9), max_size=2),
    faults=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2), st.integers(1, 4)), max_size=4),
)
def test_what_is_lost_is_listed(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], slots: int, across: bool, failing: Any, faults: Any
) -> None:
    """Records that fail for a while or for good, and steps that are broken, ranks that die and come, on top."""
    assume(slots > 1 or len({number for number, _ in failing}) < 2)  # else one step may meet both: it is the storage
    paths = write_shards(tmp_path_factory.mktemp("shards"), sizes)
    wanted: dict[str, Any] = {
        "global_batch_size": 5,
        "slots": slots,
        "epochs": 2,
        "last_batch": "across" if across else "short",
    }
    reader = Fragile(dict(failing))
    world = World(lambda **place: hf.Stream(paths, **wanted, threads=0, format=reader, **place), 2)
    counts: Counter[Any] = Counter()
    left = list(faults)
    while True:
        try:
            step = [record for scale, batch in world.draw() if scale for record in batch]
        except UsageError as error:
            assert "used up" in str(error)
            break
        fault = next((fault for fault in left if fault[0] == world.streams[0].step), None)
        if fault is not None:
            left.remove(fault)
        if fault is not None and fault[1] < 2:
            world.break_off()
        else:
            world.commit()
            counts.update(step)
        if fault is not None and fault[1] > 0:
            world.lose(fault[2], fault[2])
    lost = Counter(
        f"{number} {record}"
        for _, name, cursor in world.streams[0].quarantined
        for number in [int(Path(name).stem)]
        for record in range(cursor, sizes[number])
    )
    assert counts + lost == every(sizes) + every(sizes)


def test_a_shard_that_recovers_loses_nothing(tmp_path: Path) -> None:
    sizes = [9, 9, 9, 9]
    stream = hf.Stream(
        write_shards(tmp_path, sizes), global_batch_size=4, epochs=1, format=Fragile({(1, 4): 2, (2, 0): 4}), threads=0
    )
    with pytest.warns(UserWarning, match="will be tried again: OSError"):
        found = drain(stream)
    assert Counter(r for batch in found for r in batch) == every(sizes)
    assert stream.quarantined == []


def test_a_shard_that_keeps_failing_is_listed_and_its_beginning_counts_once(tmp_path: Path) -> None:
    sizes = [9, 9, 9, 9]
    paths = write_shards(tmp_path, sizes)
    stream = hf.Stream(paths, global_batch_size=4, epochs=2, format=Fragile({(1, 4): 6}), threads=0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = drain(stream)
    assert ["in quarantine" in str(warning.message) for warning in said] == [False, False, True]
    assert stream.quarantined == [(0, str(paths[1]), 4)]
    lost = Counter(f"1 {record}" for record in range(4, 9))
    assert Counter(r for batch in found for r in batch) == every(sizes) + every(sizes) - lost
    leases, troubles = stream.take_news()
    assert [(t.shard, t.cursor, t.tries) for t in troubles] == [(str(paths[1]), 4, tries) for tries in (1, 2, 3)]
    assert sorted(lease.number for lease in leases) == list(range(4 * 2 + 2))


def test_when_all_storage_is_gone_nothing_is_put_in_quarantine(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, [30] * 20)
    stream = hf.Stream(paths, global_batch_size=4, slots=2)
    for batch in stream:
        assert len(batch) == 4
        stream.commit()
        if stream.step == 3:
            break
    before = stream.state_dict()
    for path in paths:
        path.unlink()
    with pytest.raises(ShardError, match="failed in one step: it is the storage"):
        drain(stream)
    assert stream.state_dict()["book"]["quarantined"] == [] and stream.step >= before["step"]


def test_ranks_with_different_shards_raise(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, [5, 5])
    world = World(lambda **place: hf.Stream(paths[: 1 + place["rank"]], global_batch_size=4, slots=2, **place), 2)
    with pytest.raises(UsageError, match="the ranks have different shards"):
        world.draw()


def test_a_state_of_other_shards_is_refused(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, [5, 5])
    state = hf.Stream(paths, global_batch_size=4).state_dict()
    paths[0].write_text("another\n")
    with pytest.raises(UsageError, match="the list of shards, their sizes included, is"):
        hf.Stream(paths, global_batch_size=4).load_state_dict(state)


def test_randomness_of_a_record_is_its_own(tmp_path: Path) -> None:
    import torch

    paths = write_shards(tmp_path, [6, 6, 6])

    def noisy(record: str) -> tuple[str, float]:
        return record, torch.rand(()).item()

    def found(slots: int) -> dict[str, float]:
        stream = hf.Stream(paths, global_batch_size=3, slots=slots, epochs=1, transform=noisy, collate_fn=list)
        pairs: list[Any] = [pair for batch in drain(stream) for pair in batch]
        return dict(pairs)

    assert found(1) == found(3)


def test_sample_numbers_name_shard_and_record(tmp_path: Path) -> None:
    stream = hf.Stream(write_shards(tmp_path, [3, 3]), global_batch_size=2, epochs=1)
    for batch in stream:
        assert [f"{n >> RECORDS_BITS} {n % 2**RECORDS_BITS}" for n in stream.samples.tolist()] == batch
        stream.commit()


def test_mistakes_are_sentences(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, [3, 3])
    mistakes: list[tuple[dict[str, Any], str]] = [
        ({"shards": str(tmp_path / "*.nothing")}, "no file is called"),
        ({"shards": [paths[0], paths[0]]}, "named twice"),
        ({"slots": 9}, "9 slots for a global batch of 4"),
        ({"last_batch": "drop"}, "give across or short"),
    ]
    for arguments, words in mistakes:
        with pytest.raises(UsageError, match=words):
            given: dict[str, Any] = {"shards": paths, "global_batch_size": 4}
            hf.Stream(**(given | arguments))
    stream = hf.Stream(paths, global_batch_size=4)
    with pytest.raises(UsageError, match="nothing was drawn"):
        stream.commit()
    with pytest.raises(UsageError, match="not committed"):
        list(stream)
