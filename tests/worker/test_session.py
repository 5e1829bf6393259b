"""A session without anybody who repairs it: alone with python, and under torchrun. And what is refused, and how."""

import textwrap
from pathlib import Path

import pytest

from holdfast.errors import UsageError
from holdfast.worker.feeding import Feed
from worker.nest import TORCHRUN, Nest, run_python, write

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


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("for step in job.steps(2): pass", "a step was not entered"),
        ("for step in job.steps(2):\n    with step: pass\n    with step: pass", "a step is entered once"),
        ("job.track(model=model)\njob.track(optimizer=optimizer)", "job.track is called once"),
        ("job.track(model=model, rate=0.1)", "rate is a float, which has no state_dict"),
        (
            "data = hf.Loader([1, 2, 3], global_batch_size=1)\n"
            "for step in job.steps(1):\n    with step:\n        list(step.batches(data))",
            "the loader is not tracked",
        ),
        ("job.track(model=model)\njob.watch(numbers='skip', deviations=-1)", "deviations is -1: give a number above 0"),
        ("job.track(model=model)\njob.watch(deviations=float('nan'))", "deviations is nan: give a number above 0"),
        ("job.track(model=model)\njob.watch(checksum_every=2.5)", "checksum_every is 2.5: give a number of steps"),
    ],
    ids=["not entered", "twice", "tracked twice", "no state", "untracked loader", "negative", "no number", "no steps"],
)
def test_a_mistake_gets_a_sentence(warm: Nest, tmp_path: Path, code: str, sentence: str) -> None:
    done = warm.run(written(code, tmp_path), tmp_path)
    assert done.code == 1 and sentence in done.stderr, done.stderr


def test_a_repeated_step_gets_its_batch_again_and_a_newcomer_skips() -> None:
    draws: list[int] = []
    feed = Feed(["a", "b", "c"], prepare=draws.append)
    assert [feed.batch(0), feed.batch(0), feed.batch(1)] == ["a", "a", "b"]
    assert feed.batch(5) == "c", "the second pass"
    assert draws == [0, 1, 2, 3, 4, 5], "random numbers are set before each draw, also of what is skipped"
    assert Feed(["a", "b", "c"], prepare=draws.append).batch(4) == "b"
    own = Feed(["x", "y"], drawn=7, is_tracked=True, prepare=draws.append)
    assert own.batch(7) == "x", "one that knows its own position"
    own.undo(7)
    assert own.batch(7) == "x", "it was put back to before the step, and draws anew"
    with pytest.raises(UsageError, match="is gone"):
        feed.batch(3)
    with pytest.raises(UsageError, match="list has no batches"):
        Feed([], prepare=draws.append).batch(0)
