"""Small sessions, most of which leave something out of what a session must know: refused.py NAME [STEPS].

Each variation is a function that gets the job and yields what is done in each step's body. WORK/final-RANK has a digest
of the parameters at the end.
"""

import atexit
import copy
import hashlib
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import holdfast as hf

work = Path(os.environ["WORK"])
STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else 4


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 8, generator=generator), torch.randint(0, 4, (4,), generator=generator)


def parts(build=lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))):
    torch.manual_seed(0)
    model = DistributedDataParallel(build())
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def update(model, optimizer, step, rank) -> None:
    x, y = batch(step, rank)
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def run(job, model, *bodies) -> None:
    for step in job.steps(STEPS):
        with step:
            for body in bodies:
                body(step)
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()[:16]
    (work / f"final-{job.rank}").write_text(digest)


def plain(job) -> None:
    model, optimizer = parts()
    job.track(model=model, optimizer=optimizer)
    run(job, model, lambda step: update(model, optimizer, step.number, job.rank))


def nothing(job) -> None:
    model, optimizer = parts()
    run(job, model, lambda step: update(model, optimizer, step.number, job.rank))


def nothing_on_a_rank_that_ends_slowly(job) -> None:
    """The other rank finds the view over in its next collective, and has ended long before."""
    model, optimizer = parts()
    if job.rank == 0:
        atexit.register(time.sleep, 3)
    else:
        time.sleep(1)
        torch.distributed.all_reduce(torch.ones(1))
    run(job, model, lambda step: update(model, optimizer, step.number, job.rank))


def no_state(job) -> None:
    job.track()
    run(job, nn.Linear(1, 1), lambda step: None)


def optimizer(job) -> None:
    model, optimizer = parts()
    job.track(model=model)
    run(job, model, lambda step: update(model, optimizer, step.number, job.rank))


def ignored_optimizer(job) -> None:
    model, optimizer = parts()
    probe = nn.Linear(8, 1)
    rate = torch.optim.SGD(probe.parameters(), lr=0.1)
    job.track(model=model, optimizer=optimizer)
    job.ignore(probe, rate)

    def body(step) -> None:
        probe(batch(step.number, 0)[0]).mean().backward()
        rate.step()
        update(model, optimizer, step.number, job.rank)

    run(job, model, body)


def scheduler(job) -> None:
    model, optimizer = parts()
    rate = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    job.track(model=model, optimizer=optimizer)
    run(job, model, lambda step: update(model, optimizer, step.number, job.rank), lambda step: rate.step())


def sequential_scheduler(job) -> None:
    model, optimizer = parts()
    schedulers = torch.optim.lr_scheduler
    inner = [schedulers.ConstantLR(optimizer), schedulers.StepLR(optimizer, 1, 0.9)]
    rate = schedulers.SequentialLR(optimizer, inner, [2])
    job.track(model=model, optimizer=optimizer, rate=rate)
    run(job, model, lambda step: update(model, optimizer, step.number, job.rank), lambda step: rate.step())


def average_by_hand(job) -> None:
    model, optimizer = parts()
    average = copy.deepcopy(model.module)
    job.track(model=model, optimizer=optimizer)

    def body(step) -> None:
        update(model, optimizer, step.number, job.rank)
        for mine, other in zip(average.parameters(), model.parameters(), strict=True):
            mine.data.mul_(0.9).add_(other.data, alpha=0.1)

    run(job, model, body)


def other_module(job) -> None:
    model, optimizer = parts()
    head = nn.Linear(4, 2)
    job.track(model=model, optimizer=optimizer)
    run(job, model, lambda step: head(model(batch(step.number, job.rank)[0])).mean().backward())


def loader_by_hand(job) -> None:
    model, optimizer = parts()
    job.track(model=model, optimizer=optimizer)
    batches = iter(DataLoader(TensorDataset(torch.randn(64, 8), torch.randint(0, 4, (64,))), batch_size=4))

    def body(step) -> None:
        x, y = next(batches)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    run(job, model, body)


def loader_of_an_evaluation(job) -> None:
    model, optimizer = parts()
    job.track(model=model, optimizer=optimizer)
    data = TensorDataset(torch.randn(16, 8), torch.randint(0, 4, (16,)))
    loaders = [DataLoader(data, batch_size=4), DataLoader(data, batch_size=4, num_workers=1, persistent_workers=True)]

    def body(step) -> None:
        update(model, optimizer, step.number, job.rank)
        for loader in loaders:
            for x, _ in loader:
                model(x)

    run(job, model, body)


class Meter:
    """Counts what this rank has seen."""

    def __init__(self) -> None:
        self.sum = 0.0

    def state_dict(self) -> dict[str, float]:
        return {"sum": self.sum}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.sum = state["sum"]


def meter_of_a_rank(job) -> None:
    model, optimizer = parts()
    meter = Meter()
    job.track(model=model, optimizer=optimizer, meter=meter)

    def body(step) -> None:
        meter.sum += float(batch(step.number, job.rank)[0].sum())
        update(model, optimizer, step.number, job.rank)

    run(job, model, body)


def values_of_each_rank(job) -> None:
    """In a later step than those in which ranks compare everything."""
    model, optimizer = parts()
    job.track(model=model, optimizer=optimizer, best=1.0)

    def body(step) -> None:
        update(model, optimizer, step.number, job.rank)
        if step.number == 2:
            job.values.best = 0.5 - job.rank

    run(job, model, body)


def stages_by_hand(job) -> None:
    torch.manual_seed(job.rank)
    stage = nn.Sequential(nn.Linear(8, 4), nn.Tanh())
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    job.track(stage=stage, optimizer=optimizer)
    run(job, stage, lambda step: update(stage, optimizer, step.number, job.rank))


def local_sgd(job) -> None:
    """Equal at the start, and each rank updates by its own gradients; not before the fourth step."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job.track(model=model, optimizer=optimizer)

    def body(step) -> None:
        x, y = batch(step.number, job.rank)
        nn.functional.cross_entropy(model(x), y).backward()
        if step.number % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()

    run(job, model, body)


def norms_of_each_rank(job) -> None:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    model = DistributedDataParallel(inner, broadcast_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    job.track(model=model, optimizer=optimizer)
    run(job, model, lambda step: update(model, optimizer, step.number, job.rank))


def norms_of_rank_0(job) -> None:
    model, optimizer = parts(lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)))
    job.track(model=model, optimizer=optimizer)
    run(job, model, lambda step: update(model, optimizer, step.number, job.rank))


def other_names(job) -> None:
    model, optimizer = parts()
    names = {"model": model, "optimizer": optimizer} | ({"meter": Meter()} if job.rank == 1 else {})
    job.track(**names)
    run(job, model, lambda step: update(model, optimizer, step.number, job.rank))


def compressing_hook(job) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    model, optimizer = parts()
    job.track(model=model, optimizer=optimizer)
    model.register_comm_hook(powerSGD_hook.PowerSGDState(None), powerSGD_hook.powerSGD_hook)
    run(job, model, lambda step: update(model, optimizer, step.number, job.rank))


def count_updates(job, use) -> None:
    """Use a counter that only the script knows, before each update. Rank 1 is killed in the third step."""
    model, optimizer = parts()
    job.track(model=model, optimizer=optimizer)
    updates = 0

    def body(step) -> None:
        nonlocal updates
        updates += 1
        if step.number == 2 and job.rank == 1 and not (work / "killed").exists():
            (work / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        x, y = batch(step.number, job.rank)
        nn.functional.cross_entropy(model(x), y).backward()
        if use(updates, model, optimizer):
            optimizer.step()
            optimizer.zero_grad()

    run(job, model, body)


def counter_of_the_script(job) -> None:
    def use(updates, model, optimizer) -> bool:
        optimizer.param_groups[0]["lr"] = 1e-2 / updates
        return True

    count_updates(job, use)


def counter_of_accumulated_steps(job) -> None:
    count_updates(job, lambda updates, model, optimizer: updates % 4 == 0)


def counter_that_matters_late(job) -> None:
    """In the step before the last. A replacement has not counted so far by then."""

    def use(updates, model, optimizer) -> bool:
        if updates == STEPS:
            for parameter in model.parameters():
                parameter.grad.mul_(2)
        return True

    count_updates(job, use)


def steps_left_by_its_own_checkpoint(job) -> None:
    """The script goes on from a file of its own, as it did before it had a session. Rank 1 is killed in the third
    step."""
    model, optimizer = parts()
    done = int((work / "done").read_text()) if (work / "done").exists() else 0
    job.track(model=model, optimizer=optimizer)
    for step in job.steps(STEPS - done):
        with step:
            if step.number == 2 and job.rank == 1 and not (work / "done").exists():
                (work / "done").write_text("2")
                os.kill(os.getpid(), signal.SIGKILL)
            update(model, optimizer, step.number, job.rank)


def generator_by_hand(job) -> None:
    def batches():
        number = 0
        while True:
            yield batch(number, job.rank)
            number += 1

    model, optimizer = parts()
    job.track(model=model, optimizer=optimizer)
    drawn = batches()

    def body(step) -> None:
        x, y = next(drawn)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    run(job, model, body)


def position_by_hand(job) -> None:
    """Where the script reads next is in an attribute of its own."""

    class Reader:
        def __init__(self) -> None:
            self.position, self.last = 0, 0.0

        def next(self) -> tuple[torch.Tensor, torch.Tensor]:
            self.position += 1
            self.last = time.monotonic()
            return batch(self.position, job.rank)

    model, optimizer = parts()
    job.track(model=model, optimizer=optimizer)
    reader = Reader()

    def body(step) -> None:
        x, y = reader.next()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    run(job, model, body)


def inner_module(job) -> None:
    """Rank 1 is killed once, in the third step."""
    model, optimizer = parts()
    job.track(model=model.module, optimizer=optimizer)

    def body(step) -> None:
        if step.number == 2 and job.rank == 1 and "kill" in sys.argv and not (work / "killed").exists():
            (work / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        (work / f"pid-{job.rank}-{os.getpid()}").touch()
        update(model, optimizer, step.number, job.rank)

    run(job, model, body)


def loader_directly(job) -> None:
    model, optimizer = parts()
    data = hf.Loader(TensorDataset(torch.randn(64, 8), torch.randint(0, 4, (64,))), global_batch_size=8)
    job.track(model=model, optimizer=optimizer, data=data)

    def body(step) -> None:
        for x, y in data:
            nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    run(job, model, body)


def epochs(job) -> None:
    """Three epochs of four steps, with a scheduler that steps after each; what is hurt is in the arguments: a step in
    whose body rank 1 is killed, and an epoch after whose steps it is, before its scheduler has stepped."""
    model, optimizer = parts()
    rate = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    job.track(model=model, optimizer=optimizer, rate=rate)
    kills = sys.argv[3:]

    def hurt(point: str) -> None:
        mark = work / f"killed-{point}"
        if point in kills and job.rank == 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    for epoch, steps in job.epochs(3, 4):
        for step in steps:
            with step:
                hurt(f"step-{step.number}")
                update(model, optimizer, step.number, job.rank)
                line = f"{epoch} {step.number} {optimizer.param_groups[0]['lr']}"
                step.after_commit(lambda line=line: print(line, file=(work / f"made-{job.rank}").open("a"), flush=True))
        hurt(f"epoch-{epoch}")
        rate.step()
    (work / f"final-{job.rank}").write_text(f"{job.step} {[p.double().sum().item().hex() for p in model.parameters()]}")


def outside(job) -> None:
    """A collective and a barrier between two steps, what is logged after the `with`, and a generator of its own. Rank 1
    may be killed once, in the body of the third step."""
    model, optimizer = parts()
    noise = torch.Generator().manual_seed(5)
    job.track(model=model, optimizer=optimizer)
    for step in job.steps(STEPS):
        with step:
            (work / f"pid-{job.rank}-{os.getpid()}").touch()
            if step.number == 2 and job.rank == 1 and "kill" in sys.argv and not (work / "killed").exists():
                (work / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            update(model, optimizer, step.number, job.rank)
            step.log(loss=1.0 + 0 * float(torch.rand((), generator=noise)))
        torch.distributed.all_reduce(torch.ones(1))
        job.barrier()
        step.log(late=2.0)
        assert not step.is_committed or job.logged == {"loss": 1.0, "late": 2.0}
    (work / f"final-{job.rank}").write_text(f"{job.step} {[p.double().sum().item().hex() for p in model.parameters()]}")


def loaded_after_track(job) -> None:
    """What the training begins with is loaded after `job.track`."""
    model, optimizer = parts()
    beginning = {name: torch.ones_like(value) for name, value in model.state_dict().items()}
    job.track(model=model, optimizer=optimizer)
    model.load_state_dict(beginning)
    run(job, model, lambda step: update(model, optimizer, step.number, job.rank))


def leave_by(job, how: str) -> None:
    """All ranks leave the loop after its second step of four."""
    model, optimizer = parts()
    job.track(model=model, optimizer=optimizer)
    for step in job.steps(STEPS):
        with step:
            update(model, optimizer, step.number, job.rank)
        if step.is_committed and step.number == 1:
            (work / f"final-{job.rank}").write_text(str(job.step))
            if how == "break":
                break
            sys.exit(0)


def exit_with_0(job) -> None:
    leave_by(job, "exit")


def left_by_one(job) -> None:
    """Rank 1 ends well after its third step, on its own."""
    model, optimizer = parts()
    job.track(model=model, optimizer=optimizer)
    for step in job.steps(STEPS):
        with step:
            update(model, optimizer, step.number, job.rank)
        if step.is_committed and step.number == 2 and job.rank == 1:
            sys.exit(0)


def vanishes(job) -> None:
    """The process of rank 1 ends with code 0 in the third step, once, if told to."""
    model, optimizer = parts()
    job.track(model=model, optimizer=optimizer)

    def body(step) -> None:
        (work / f"pid-{job.rank}-{os.getpid()}").touch()
        if step.number == 2 and job.rank == 1 and "kill" in sys.argv and not (work / "killed").exists():
            (work / "killed").touch()
            os._exit(0)
        update(model, optimizer, step.number, job.rank)

    run(job, model, body)


def break_out(job) -> None:
    leave_by(job, "break")


def epoch_loop(job) -> None:
    model, optimizer = parts()
    job.track(model=model, optimizer=optimizer)
    for _ in range(2):
        run(job, model, lambda step: update(model, optimizer, step.number, job.rank))


if __name__ == "__main__":
    globals()[sys.argv[1]](hf.init())
