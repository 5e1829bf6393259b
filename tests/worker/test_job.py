"""A session without anybody who repairs it: alone with python, and under torchrun. And what is refused, and how."""

import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.utils.data import BatchSampler, DataLoader

from holdfast.errors import UsageError
from holdfast.worker.iterable_source import IterableSource
from support.nest import TORCHRUN, Nest, run_python, write

HEAD = """
import torch, torch.distributed as dist
import holdfast as hf

job = hf.init(seed=5)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters())
"""


def written(code: str, directory: Path) -> list[str]:
    write(directory / "script.py", HEAD + textwrap.dedent(code))
    return ["script.py"]


TRAIN = """
job.track(model=model, optimizer=optimizer)
batches = [torch.full((2, 4), float(i)) for i in range(3)]
seen = []
for step in job.steps(7):
    with step:
        for x in step.batches(batches):
            seen.append(int(x[0, 0]))
            loss = model(x).mean()
            step.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        step.log(loss=loss)
    assert step.is_committed and job.step == step.number + 1 and job.logged["loss"] == float(loss)
assert seen == [0, 1, 2, 0, 1, 2, 0], seen
assert hf.init() is job
line = f"{job.rank} {job.world_size} {job.view} {job.step} {float(loss).hex()}"
print(line + chr(10), end="", flush=True)  # in one piece: two ranks write to the same pipe
"""


def test_alone(tmp_path: Path) -> None:
    script = written(TRAIN, tmp_path)
    done = run_python(script, tmp_path)
    assert done.code == 0, done.stderr
    assert done.stdout.split()[:4] == ["0", "1", "0", "7"]
    assert done.stdout == run_python(script, tmp_path).stdout, "dropout is a function of the seed and the step"


def test_under_torchrun(tmp_path: Path) -> None:
    done = run_python([*TORCHRUN, *written(TRAIN, tmp_path)], tmp_path)
    assert done.code == 0, done.stderr
    assert sorted(line.split()[:4] for line in done.stdout.splitlines()) == [["0", "2", "0", "7"], ["1", "2", "0", "7"]]


def test_what_the_user_raises_goes_through(warm: Nest, tmp_path: Path) -> None:
    code = """
    job.track(model=model, optimizer=optimizer)
    for step in job.steps(3):
        with step:
            raise KeyError("mine")
    """
    done = warm.run(written(code, tmp_path), tmp_path)
    assert done.code == 1 and "KeyError: 'mine'" in done.stderr


def test_sparse_gradients_are_watched_like_any_other(warm: Nest, tmp_path: Path) -> None:
    code = """
    table = torch.nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    job.track(model=table, optimizer=optimizer)
    job.watch(numbers="skip")
    for step in job.steps(4):
        with step:
            loss = table(torch.tensor([1, 1, 3])).square().mean()
            step.backward(loss)
            if step.number == 2:
                table.weight.grad._values().fill_(float("inf"))
            optimizer.step()
            optimizer.zero_grad()
        print(step.number, step.is_committed, bool(table.weight.isfinite().all()))
    """
    done = warm.run(written(code, tmp_path), tmp_path)
    assert done.code == 0, done.stderr
    assert done.stdout.split("\n")[:-1][-1] == "3 True True"


def test_epochs_number_their_steps_through(warm: Nest, tmp_path: Path) -> None:
    code = """
    job.track(model=model, optimizer=optimizer)
    for epoch, steps in job.epochs(3, 2):
        for step in steps:
            with step:
                print(epoch, step.number, end=";")
        print(job.step, end=" ")
        if epoch == 1:
            break
    """
    done = warm.run(written(code, tmp_path), tmp_path)
    assert (done.code, done.stdout) == (0, "0 0;0 1;2 1 2;1 3;4 "), done.stderr


def test_plain_values_are_tracked_and_set_in_steps(tmp_path: Path) -> None:
    code = """
    job.track_local(own=job.rank)
    job.track(model=model, optimizer=optimizer, best=float("inf"), best_step=-1)
    for step in job.steps(4):
        with step:
            loss = [4.0, 2.5, 3.0, 2.75][step.number]
            if loss < job.values.best:
                job.values.best, job.values.best_step = torch.tensor(loss), step.number
            job.values.own += 10
    print(job.values.best, job.values.best_step, job.values.own)
    """
    done = run_python(written(code, tmp_path), tmp_path)
    assert (done.code, done.stdout) == (0, "2.5 1 40\n"), done.stderr


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("for step in job.steps(2): pass", "a step was not entered"),
        ("for _ in range(2):\n    for step in job.steps(2):\n        with step: pass", "a job has one loop of steps"),
        (
            "for epoch, steps in job.epochs(2, 3):\n    for step in steps:\n        with step: break",
            "epoch 0 was left before its last step",
        ),
        ("for step in job.steps(2):\n    with step: pass\n    with step: pass", "a step is entered once"),
        ("job.track(model=model)\njob.track(optimizer=optimizer)", "job.track is called once"),
        ("job.track(model=model, rates=[0.1])", "ScriptError: rates is a list, which has no state_dict and no load_"),
        (
            "job.track_local(meter={'best': 0.1})",
            "track what is in it by name, numbers and words as they are (best=0.0)",
        ),
        ("job.track(model=model, scheme=object())", "ScriptError: scheme is a object, which has no state_dict"),
        (
            "job.track(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1), model[0], data=0)",
            "job.track takes names, by which a state is found again: write job.track(model=model, optimizer=optimizer,"
            " scheduler=scheduler, model2=model2)",
        ),
        ("job.track_local(object())", "write job.track_local(thing=thing)"),
        (
            "data = hf.Loader([1, 2, 3], global_batch_size=1)\n"
            "for step in job.steps(1):\n    with step:\n        list(step.batches(data))",
            "the loader is not tracked",
        ),
        ("job.track(model=model)\njob.watch(numbers='skip', deviations=-1)", "deviations is -1: give a number above 0"),
        ("job.track(model=model)\njob.watch(deviations=float('nan'))", "deviations is nan: give a number above 0"),
        ("job.track(model=model)\njob.watch(checksum_every=2.5)", "checksum_every is 2.5: give a number of steps"),
    ],
    ids=[
        *(
            "not entered",
            "second loop",
            "epoch left",
            "twice",
            "tracked twice",
            "no state",
            "a dict",
            "an object",
            "no names",
        ),
        *("no names of its own", "untracked loader"),
        *("negative", "no number", "no steps"),
    ],
)
def test_a_mistake_gets_a_sentence(warm: Nest, tmp_path: Path, code: str, sentence: str) -> None:
    done = warm.run(written(code, tmp_path), tmp_path)
    assert done.code == 1 and sentence in done.stderr, done.stderr


def test_a_second_draw_in_one_step_is_the_same_batch_and_is_warned_of(warm: Nest, tmp_path: Path) -> None:
    code = """
    job.track(model=model, optimizer=optimizer)
    data = [1, 2, 3]
    for step in job.steps(2):
        with step:
            print(*step.batches(data), *step.batches([7]), *(step.batches(data) if step.number else ()))
    """
    done = warm.run(written(code, tmp_path), tmp_path)
    assert done.code == 0 and done.stdout.splitlines()[-2:] == ["1 7", "2 7 2"], done.stderr
    assert done.stderr.count("step.batches is called again for the same data in one step") == 1
    assert "script.py:" in done.stderr


def test_a_repeated_step_gets_its_batch_again_and_a_newcomer_skips() -> None:
    draws: list[int] = []
    feed = IterableSource(["a", "b", "c"], prepare=draws.append)
    assert [feed.batch(0), feed.batch(0), feed.batch(1)] == ["a", "a", "b"]
    assert feed.batch(5) == "c", "the second pass"
    assert draws == [0, 1, 2, 3, 4, 5], "random numbers are set before each draw, also of what is skipped"
    assert IterableSource(["a", "b", "c"], prepare=draws.append).batch(4) == "b"
    own = IterableSource(["x", "y"], drawn=7, is_tracked=True, prepare=draws.append)
    assert own.batch(7) == "x", "one that knows its own position"
    own.undo(7)
    assert own.batch(7) == "x", "it was put back to before the step, and draws anew"
    with pytest.raises(UsageError, match="is gone"):
        feed.batch(3)
    with pytest.raises(UsageError, match="list has no batches"):
        IterableSource([], prepare=draws.append).batch(0)


class Shuffled:
    """A sampler whose order depends on the epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(10 * self.epoch + index for index in range(3))


class Positioned:
    """A loader that keeps its position in its state, but not its epoch, as torchdata's."""

    def __init__(self, position: int = 0) -> None:
        self.sampler, self.position = Shuffled(), position

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[int]:
        for item in list(self.sampler)[self.position :]:
            self.position += 1
            yield item
        self.position = 0


def test_a_sampler_inside_a_batch_sampler_is_told_the_epoch_too() -> None:
    batch_sampler = BatchSampler(Shuffled(), 1, drop_last=False)
    loader: DataLoader[int] = DataLoader(range(40), batch_sampler=batch_sampler)  # type: ignore[arg-type]
    everything = [int(IterableSource(loader, prepare=lambda _: None).batch(step)) for step in range(7)]
    assert everything == [0, 1, 2, 10, 11, 12, 20], "of newcomers, each of which skips to its step"


def test_a_loader_that_keeps_its_position_is_told_the_epoch_of_the_step() -> None:
    """In a newcomer, whose first batch is one of a later epoch, and in a repeated step."""
    whole = Positioned()
    feed = IterableSource(whole, is_tracked=True, prepare=lambda _: None)
    for step in range(8):
        before = whole.position
        expected = 10 * (step // 3) + step % 3
        assert feed.batch(step) == expected
        whole.position = before  # as when a step is undone
        feed.undo(step)
        assert feed.batch(step) == expected, "repeated"
        newcomer = IterableSource(Positioned(before), step, is_tracked=True, prepare=lambda _: None)
        assert newcomer.batch(step) == expected, "in a newcomer"
