"""What a training script holds in its hands: `job = hf.init()`.

    job = hf.init()                                      joins; torch.distributed is ready
    model = DistributedDataParallel(build_model())       or fully_shard(build_model())
    opt = torch.optim.AdamW(model.parameters())
    data = hf.Loader(dataset, global_batch_size=256, seed=0)
    job.track(model=model, optimizer=opt, data=data)     restores, if there is anything to restore

    for step in job.steps(10_000):
        with step:                                       a fault in here repeats the step
            for x, y in step.batches(data):
                step.backward(F.cross_entropy(model(x), y))
            opt.step()
            opt.zero_grad()

Under `holdfast run` the job is repaired while it runs. Under torchrun, or plain python, the same script runs without.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, get_args

import torch.distributed as dist

from holdfast.data.handing import Handing, Weight
from holdfast.data.randomness import set_generators, slot_key
from holdfast.errors import UsageError
from holdfast.state.tracked import Tracked
from holdfast.worker import elastic
from holdfast.worker.birth.error_file import ERROR_FILE_VARIABLE
from holdfast.worker.collectives import groups
from holdfast.worker.engine import Engine
from holdfast.worker.feeding import Feed
from holdfast.worker.guards import DEVIATIONS, Policy
from holdfast.worker.launch import launch
from holdfast.worker.parallel.canonical import Canonical
from holdfast.worker.parallel.models import communicates_in_forward, prepare_models, set_gradient_sync
from holdfast.worker.steps import Step

Reduction = Literal["average", "canonical"]
DEFAULT_TIMEOUT = timedelta(minutes=30)
"""Of a collective, as torch's own. A dead rank is noticed in milliseconds, a hung one by its progress record."""
STEP_LOG = "steps.jsonl"

_job: Job | None = None


def init(*, seed: int | None = None, timeout: timedelta = DEFAULT_TIMEOUT, reduction: Reduction = "average") -> Job:
    """Join the job. `seed` is that of the steps' random generators; without one, rank 0's `torch.initial_seed()`.

    `reduction="canonical"` gives the gradients the same bits whatever the number of ranks, for replicated models and an
    `hf.Loader` with slots.
    """
    global _job
    if reduction not in get_args(Reduction):
        raise UsageError(f"reduction is {reduction!r}; it can be {' or '.join(get_args(Reduction))}")
    if _job is None:
        _job = Job(seed, timeout, reduction)
    return _job


def is_begun() -> bool:
    """Whether this process has joined."""
    return _job is not None


class Job:
    """A worker's part in the training job. Made by `hf.init()`."""

    def __init__(self, seed: int | None, timeout: timedelta, reduction: Reduction) -> None:
        launched = launch(timeout)
        self._page = launched.page
        self._launched = launched
        self._tracked = Tracked()
        self._engine = Engine(launched, self._tracked, seed)
        self._feeds: dict[int, Feed] = {}
        self._reduction = reduction
        self._canonical: Canonical | None = None
        self._unsettled: Step | None = None
        """One that was through when the function was left, and may turn out to be committed."""
        self._is_unwinding = False
        """Whether an error leaves the loop of the steps."""
        self._attempt = 0
        self._barriers = (0, 0)
        """Of which view the last one was, and its number there."""
        self.logged: dict[str, float] = {}
        """What `step.log` was given in the last committed step."""
        elastic.prepare_with(self._start_over)

    # --- what can be read

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        return dist.get_world_size()

    @property
    def local_rank(self) -> int:
        return int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def view(self) -> int:
        """The number of the view this worker is in; 0 where nobody makes views."""
        return self._engine.membership.view if self._engine.membership else 0

    @property
    def step(self) -> int:
        """The number of the step under way, or of the next one; as many are committed."""
        return self._engine.next_step

    # --- what can be done

    def track(self, **objects: Any) -> None:
        """Name what makes up the state: models, optimizers, schedulers, scalers, loaders, anything with state_dict and
        load_state_dict. Everything of it is kept, rolled back and handed over together."""
        if len(self._tracked):
            raise UsageError("job.track is called once: name everything that makes up the state in one call")
        for name, thing in objects.items():
            self._tracked.add(name, thing)
        for optimizer in self._tracked.optimizers().values():
            optimizer.register_step_pre_hook(self._before_update)
        modules = list(self._tracked.modules().values())
        prepare_models(modules)
        if communicates_in_forward(modules):
            for thing in self._tracked.others().values():
                if isinstance(thing, Handing):
                    thing.even_batches = True
        if self._reduction == "canonical":
            self._canonical = Canonical(self._tracked)
        self._engine.restore()

    def steps(self, total: int) -> Iterator[Step]:
        """The steps that are left of `total`, each until it is committed."""
        if self._reduction == "canonical" and self._canonical is None:
            raise UsageError("reduction='canonical' needs to know the model: call job.track before job.steps")
        self._engine.begin()
        self._engine.bring_in()
        self._settle_last()
        try:
            while self._engine.next_step < total:
                step = Step(self, self._engine.next_step, self._attempt)
                yield step
                if not step.is_entered:
                    raise UsageError("a step was not entered: `for step in job.steps(n): with step: …`")
                self._engine.bring_in()
            self._engine.close()
        except GeneratorExit:
            # The loop was left by a `break`, on all ranks for the same reason; not by an error, which is repaired.
            if not self._is_unwinding and not sys.is_finalizing():
                self._engine.leave()
            raise

    @contextmanager
    def paused(self, why: str) -> Iterator[None]:
        """In here nothing is taken for a hang: an evaluation, a long write."""
        self._page.move(paused=self._page.get("paused") + 1)
        try:
            yield
        finally:
            self._page.move(paused=self._page.get("paused") - 1)

    def watch(
        self, *, numbers: Policy | None = None, deviations: float = DEVIATIONS, checksum_every: int = 0
    ) -> None:
        """Watch over the numbers; after `track`. A loss (`step.backward`) or gradient that is not finite, or beyond
        `deviations` of those before, has its step repeated once; if it comes back, `numbers` decides: `skip` the
        batch, `stop`, or `go-on`. Every `checksum_every` steps, ranks that should have the same parameters compare
        them."""
        if not len(self._tracked):
            raise UsageError("job.watch needs to know the model: call job.track before")
        self._engine.guards.watch(self._tracked, numbers, deviations, checksum_every)

    def barrier(self, timeout: float = 60.0) -> None:
        """Wait until all ranks are here; MissingRanksError after `timeout` seconds names those that are not."""
        self._barriers = (self.view, self._barriers[1] + 1 if self._barriers[0] == self.view else 0)
        self._page.move(collectives=self._page.get("collectives") + 1)
        groups.barrier(f"barrier/{self._barriers[1]}", timeout)

    def _start_over(self) -> None:
        """Everything that was built is left behind; `track` will be told what takes its place."""
        self._tracked = Tracked()
        self._feeds.clear()
        self._canonical = None
        self._is_unwinding = False
        self._attempt = 0
        self._engine.start_over(self._tracked)

    # --- a step's own business

    def _before_update(self, optimizer: Any, *_: Any) -> None:
        if self._engine.is_stepping:
            if self._canonical is not None:
                self._canonical.before_update()
            self._engine.guards.look()
            self._engine.before_update(optimizer)

    def _begin_step(self, step: Step) -> None:
        self._engine.begin_step()
        if self._canonical is not None:
            self._canonical.begin_step(step.number, self._engine.seed)

    def _end_step(self, step: Step, error: BaseException | None) -> bool:
        set_gradient_sync(self._tracked.modules().values(), True)
        self._is_unwinding = True  # until it is known to be otherwise
        try:
            is_repeated = self._engine.end_step(error)
        except elastic.Reenter:
            self._unsettled = step
            raise
        self._is_unwinding = error is not None and not is_repeated
        if is_repeated:
            self._attempt += 1
            for feed in self._feeds.values():
                feed.undo(step.number)
        elif error is None:
            self._attempt = 0
            step.is_committed = True
            self._keep_values(step)
        return is_repeated

    def _saw_loss(self, loss: Any) -> None:
        self._engine.guards.see_loss(loss)

    def _settle_last(self) -> None:
        step, self._unsettled = self._unsettled, None
        if step is not None and step.number < self._engine.next_step:
            self._keep_values(step)

    def _keep_values(self, step: Step) -> None:
        self.logged = self._engine.logged = step.values
        error_file = os.environ.get(ERROR_FILE_VARIABLE, "")
        if step.values and error_file:
            line = {"step": step.number, "rank": self.rank, "view": self.view} | step.values
            with Path(error_file).with_name(STEP_LOG).open("a") as file:
                file.write(json.dumps(line) + "\n")

    def _batches(self, step: Step, data: Any, weight: Weight | None) -> Iterator[Any]:
        if self._canonical is not None:
            self._canonical.check(data)
        if not hasattr(data, "step_batches"):
            if weight is not None:
                raise UsageError("weight= needs an hf.Loader or an hf.Stream, which know all of a step's batches")
            batch = self._feed(step, data).batch(step.number)
            self._set_generators(step.number)  # as if nothing had been drawn: a repeated step draws nothing
            yield batch
            return
        if not self._is_tracked(data):
            raise UsageError("the loader is not tracked: name it in job.track(data=…), so that its position is kept")
        if self._canonical is not None:
            yield from self._canonical.batches(step, data, self._engine.seed, weight)
            return
        modules = self._tracked.modules().values()
        for batch in data.step_batches(weight=weight):
            set_gradient_sync(modules, data.is_last_of_step)
            step._uses(data.loss_scale)
            set_generators(slot_key(self._engine.seed, step.number, data.slot))
            yield batch

    def _feed(self, step: Step, data: Iterable[Any]) -> Feed:
        """One that keeps its own position, and is tracked, is where it should be; any other starts at its beginning."""
        if id(data) not in self._feeds:
            is_tracked = self._is_tracked(data)
            drawn = step.number if is_tracked else 0
            self._feeds[id(data)] = Feed(data, drawn, is_tracked=is_tracked, prepare=self._set_generators)
        return self._feeds[id(data)]

    def _set_generators(self, step: int) -> None:
        set_generators(slot_key(self._engine.seed, step, self.rank))

    def _is_tracked(self, thing: Any) -> bool:
        return any(thing is other for other in self._tracked.others().values())
