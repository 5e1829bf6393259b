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
            step.after_commit(lambda: print(job.step))   once per step; what is behind the `with`, once per attempt

Under `holdfast run` the job is repaired while it runs. Under torchrun, or plain python, the same script runs without.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, get_args

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from holdfast.core.anomalies import DEVIATIONS
from holdfast.data.batch_source import BatchSource, Weight
from holdfast.errors import Reenter, ScriptError, UsageError
from holdfast.state.plain_values import TrackedValues, forget_values, with_values_held
from holdfast.state.tracked import Tracked
from holdfast.torch_compat import never_compiled
from holdfast.worker import elastic, hand_drawn_batches
from holdfast.worker.bootstrap import launch
from holdfast.worker.collectives import groups
from holdfast.worker.engine import Engine
from holdfast.worker.iterable_source import IterableSource
from holdfast.worker.launch import script
from holdfast.worker.launch.error_file import ERROR_FILE_VARIABLE
from holdfast.worker.loop_exit import is_left_by_choice
from holdfast.worker.micro_batches import MicroBatches
from holdfast.worker.numeric_guards import Policy
from holdfast.worker.outside_steps import warn_of_repeats
from holdfast.worker.parallel import pipelines, wrappers
from holdfast.worker.parallel.canonical import CanonicalReduction
from holdfast.worker.parallel.holdings import DeclaredMesh, declared_mesh
from holdfast.worker.parallel.models import communicates_in_forward, prepare_models, set_gradient_sync
from holdfast.worker.script_checks import (
    ScriptChecks,
    add_tracked,
    check_something_tracked,
    refuse_unnamed,
    warn_once,
)
from holdfast.worker.shown_loss import LOSS
from holdfast.worker.step import Step
from holdfast.worker.tracked_loaders import Sizing, common_coordinates
from holdfast.worker.worker_state import WorkerState

Reduction = Literal["average", "canonical"]
DEFAULT_TIMEOUT = timedelta(minutes=30)
"""Of a collective, as torch's own. A dead rank is noticed in milliseconds, a hung one by its progress record."""
STEP_LOG = "steps.jsonl"
_END = object()
"""In place of a batch, when there are no more."""

_job: Job | None = None


def init(
    *,
    seed: int | None = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
    reduction: Reduction = "average",
    resizable: bool | None = None,
    mesh: DeviceMesh | Mapping[str, int] | None = None,
    replicated: str | Sequence[str] = (),
) -> Job:
    """Join the job. `seed` is that of the steps' random generators; without one, rank 0's `torch.initial_seed()`.

    `reduction="canonical"` gives the gradients the same bits whatever the number of ranks, for replicated models and an
    `hf.Loader` with slots.

    `resizable`: whether the number of workers may change while they run. If nothing is said, it may where all data
    comes from an `hf.Loader` or an `hf.Stream`. True: this script splits its data by `job.rank` and `job.world_size`
    in every step.

    `mesh`: how a model is cut that torch's DTensors do not show (experts, stages or tensor parallel by hand), as sizes
    by name in the order of `init_device_mesh`, or as a DeviceMesh, which needs a second call: `hf.init()`, then
    `hf.init(mesh=mesh, replicated="dp")`, before `job.track`. `replicated`: the dimensions along which all ranks have
    the same part of the model. What DTensors, names or shapes show needs no declaration.
    """
    global _job
    if reduction not in get_args(Reduction):
        raise UsageError(f"reduction is {reduction!r}; it can be {' or '.join(get_args(Reduction))}")
    if _job is None:
        _job = Job(seed, timeout, reduction, resizable)
    if mesh is not None:
        _job._declare(declared_mesh(mesh, replicated))
    elif replicated:
        raise UsageError(
            "replicated= names dimensions of a mesh: give the mesh too, hf.init(mesh={'dp': 2, 'tp': 2}, …)"
        )
    return _job


def is_begun() -> bool:
    """Return whether this process has joined."""
    return _job is not None


class Job:
    """A worker's part in the training job. Made by `hf.init()`."""

    def __init__(
        self, seed: int | None, timeout: timedelta, reduction: Reduction, resizable: bool | None = None
    ) -> None:
        launched = launch(timeout)
        self._page = launched.page
        self._launched = launched
        self._tracked = Tracked()
        self._sizing = Sizing(resizable)
        self._state = state = WorkerState(
            self._tracked,
            launched.page,
            launched.agent,
            replicas=launched.replicas,
            are_replicas_default=launched.are_replicas_default,
            checkpoint_dir=launched.checkpoint_dir,
            snapshots=launched.snapshots,
            sizing=self._sizing,
        )
        self._engine = Engine(
            state,
            launched.page,
            seed,
            agent=launched.agent,
            membership=launched.membership,
            spare=launched.spare,
            is_newcomer=launched.is_newcomer,
            expected_shards=lambda: launched.expected_shards,
        )
        self._micro_batches = MicroBatches(self._engine, self._tracked)
        self._sources: dict[int, IterableSource] = {}
        self._reduction = reduction
        self._canonical: CanonicalReduction | None = None
        self._uncertain_step: Step | None = None
        """One that was through when the function was left, and may turn out to be committed."""
        self._is_unwinding = False
        """Whether an error leaves the loop of the steps."""
        self._is_looping = self._is_left = False
        """Whether the loop of the steps has begun, and whether it is over."""
        self._attempt = 0
        self._checks: ScriptChecks | None = None
        """Of a session, from its first step on."""
        self._is_declared = False
        """Whether `track` was called."""
        self._ignored: list[Any] = []
        self._barriers = (0, 0)
        """Of which view the last one was, and its number there."""
        self.logged: dict[str, float] = {}
        """What `step.log` was given in the last committed step."""
        self.values = TrackedValues()
        """The plain values that are tracked, as attributes to read and to set."""
        elastic.prepare_with(self._start_over)
        hand_drawn_batches.watch(self._drawing_step)
        wrappers.note_wrappers()
        if launched.membership is not None:
            script.on_failure(launched.membership.report_failing)
        atexit.register(self._at_exit)  # before the groups are closed: what is registered last is called first

    # --- what can be read

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        return dist.get_world_size()

    @property
    def local_rank(self) -> int:
        """The number of this worker on its node. LOCAL_RANK is the number of its device: another one after the node's
        workers have become fewer, and 0 with `--virtual-local-rank`."""
        if (spare := self._launched.spare) is not None:
            spare.wait()
        membership = self._engine.membership
        if membership is not None and membership.assignment is not None:
            return membership.assignment.local_rank
        return int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def view(self) -> int:
        """The number of the view this worker is in; 0 where there are no views."""
        return self._engine.membership.view if self._engine.membership else 0

    @property
    def step(self) -> int:
        """The number of the step under way, or of the next one; as many are committed."""
        return self._engine.next_step

    # --- what can be done

    def _declare(self, declared: DeclaredMesh) -> None:
        """Know how the script cuts its model. An elastic function declares it each time it is entered."""
        if self._is_declared:
            raise ScriptError("hf.init(mesh=…) comes before job.track, which needs to know how the model is cut")
        self._state.sharding.declared = declared

    def track(self, *unnamed: Any, **objects: Any) -> None:
        """Name what makes up the state: models, optimizers, schedulers, scalers, loaders, anything with state_dict and
        load_state_dict, and plain values (`best=0.0`), which are read and set in `job.values`. Everything of it is
        kept, rolled back and handed over together. A pipeline's schedule is named too (`pipeline=schedule`), so that it
        is put in order after a fault. `job.track()` says that there is no state."""
        refuse_unnamed("track", unnamed)
        if self._is_declared:
            raise ScriptError("job.track is called once: name everything that makes up the state in one call")
        self._is_declared = True
        schedules = [thing for thing in objects.values() if pipelines.is_schedule(thing)]
        self._state.follow_pipelines(schedules)
        if schedules:
            self._engine.stage = pipelines.stage_number(schedules)
        objects = {name: thing for name, thing in objects.items() if not pipelines.is_schedule(thing)}
        for name, thing in wrappers.resolved(with_values_held(objects, self.values)).items():
            add_tracked(self._tracked, name, thing)
        for optimizer in self._tracked.optimizers().values():
            optimizer.register_step_pre_hook(never_compiled(self._before_update))
        modules = list(self._tracked.modules().values())
        if self._engine.membership is not None:
            wrappers.refuse_stateful_hooks(modules)
        prepare_models(modules)
        if communicates_in_forward(modules):
            for thing in self._tracked.others().values():
                if isinstance(thing, BatchSource):
                    thing.even_batches = True
        self._engine.coordinates = common_coordinates(self._tracked)
        if self._reduction == "canonical":
            self._canonical = CanonicalReduction(self._tracked)
            self._canonical.check_coordinates(self._engine.coordinates)
        self._engine.restore()

    def ignore(self, *objects: Any) -> None:
        """Declare that these objects are not part of the state, though they change in the steps: an optimizer, a
        module, a scheduler, a DataLoader. They are neither put back when a step is repeated nor given to a
        replacement. Before the first step."""
        self._ignored += objects

    def track_local(self, *unnamed: Any, **objects: Any) -> None:
        """Name what each rank has for itself, before `track`: sums over its own samples, the position of its reader,
        plain values. Kept, rolled back and handed over like everything else, but never to another rank; for that a copy
        is sent to another rank before each step is committed. Change it inside of steps only."""
        refuse_unnamed("track_local", unnamed)
        if self._is_declared:
            raise ScriptError("job.track_local comes before job.track, which restores everything at once")
        for name, thing in with_values_held(objects, self.values).items():
            add_tracked(self._tracked, name, thing, is_local=True)

    def steps(self, total: int) -> Iterator[Step]:
        """Yield the steps that are left of `total`, each until it is committed."""
        self._begin_loop(total)
        yield from self._steps(total)

    def epochs(self, count: int, steps_per_epoch: int) -> Iterator[tuple[int, Iterator[Step]]]:
        """The epochs that are left of `count`, by number, each with the steps that are left of it:

            for epoch, steps in job.epochs(3, 100):
                for step in steps:
                    with step: …

        Steps are numbered through. A process that joins, or a job that is started again, goes on in the middle of its
        epoch; code before the inner loop runs there once more, and what it changes of the state is overwritten.
        """
        if count < 0 or steps_per_epoch < 1:
            raise ScriptError(f"{count} epochs of {steps_per_epoch} steps cannot be: give 0 or more, and 1 or more")
        self._begin_loop(count * steps_per_epoch)
        steps = self._steps(count * steps_per_epoch)
        ahead: list[Step] = []
        while (epoch := self._engine.upcoming_step // steps_per_epoch) < count:
            yield epoch, self._steps_of_epoch(steps, epoch, steps_per_epoch, ahead)
            if not ahead and self._engine.upcoming_step // steps_per_epoch == epoch:
                raise ScriptError(f"epoch {epoch} was left before its last step: make all of them, or leave both loops")
        next(steps, None)  # until all ranks have committed the last one

    def _steps_of_epoch(self, steps: Iterator[Step], epoch: int, size: int, ahead: list[Step]) -> Iterator[Step]:
        """Yield the steps of one epoch. The next one is asked for when the script asks: what it does between two epochs
        comes before that."""
        while self._engine.upcoming_step // size == epoch:
            step = ahead.pop() if ahead else next(steps)
            if step.number // size != epoch:  # all who had the state died meanwhile, and it begins at a checkpoint
                ahead.append(step)
                return
            yield step

    def _begin_loop(self, total: int) -> None:
        """Meet the others: from here on it is known which step is next."""
        if self._is_looping:
            raise ScriptError(
                "a job has one loop of steps, and there was one: write `for step in job.steps(epochs * n):` with"
                " `epoch = step.number // n`, or `for epoch, steps in job.epochs(epochs, n): for step in steps:`"
            )
        if self._reduction == "canonical" and self._canonical is None:
            raise ScriptError("reduction='canonical' needs to know the model: call job.track before job.steps")
        if len(self._tracked) and not self._is_declared:
            self.track()  # nothing but what each rank has for itself
        if self._engine.membership is not None:
            check_something_tracked(self._is_declared)
            pipelines.refuse_untracked(self._state.pipelines)
            self._checks = ScriptChecks(self._tracked, self._ignored)
        self._is_looping = self._is_unwinding = True
        self._engine.total = max(total, 0)
        self._engine.begin()
        self._is_unwinding = False

    def _steps(self, total: int) -> Iterator[Step]:
        self._page.set(total=max(total, 0))
        try:
            self._engine.enter_view()
            self._complete_last()
            while self._engine.next_step < total:
                step = Step(self, self._engine.next_step, self._attempt)
                self._engine.remember()
                self._engine.is_outside = True
                yield step
                self._enter_session_code()
                if not step.is_entered:
                    raise ScriptError("a step was not entered: `for step in job.steps(n): with step: …`")
                self._leave_outside(step)  # before others are given our state
                self._engine.enter_view()
            self._engine.close()
            self._end_loop()
        except GeneratorExit:
            # A `break` comes on all ranks for the same reason; an exception makes this a failed worker like any other.
            self._enter_session_code()
            if not sys.is_finalizing() and is_left_by_choice(sys._getframe()):
                self._leave()
            raise
        except BaseException:
            self._is_unwinding = True  # of the session itself: an error, or this worker was told to go
            raise

    def _enter_session_code(self) -> None:
        self._engine.is_outside = False
        groups.answer_locally(False)

    def _leave(self) -> None:
        """Go without making all the steps, unless an error came out of one."""
        if not self._is_unwinding and not self._is_left:
            self._end_loop()
            if self._engine.transaction.is_aborted:
                warn_once(
                    "left",
                    f"the loop is left after an aborted attempt of step {self._engine.next_step}, which is not made:"
                    " decide to leave under `if step.is_committed:`, and by what is tracked",
                )
            self._engine.leave_outside()
            self._engine.leave()

    def _end_loop(self) -> None:
        self._is_left = True
        self._end_checks()

    def _at_exit(self) -> None:
        """End the training if the script has ended well in the middle of its loop."""
        if self._checks is not None and script.has_ended_well():
            self._leave()

    @contextmanager
    def paused(self, why: str) -> Iterator[None]:
        """Mark a time in which nothing is taken for a hang: an evaluation, a long write."""
        self._page.move(paused=self._page.get("paused") + 1)
        try:
            yield
        finally:
            self._engine.leave_pace()
            self._page.move(paused=self._page.get("paused") - 1)

    def watch(self, *, numbers: Policy | None = None, deviations: float = DEVIATIONS, checksum_every: int = 0) -> None:
        """Watch over the numbers; after `track`. A loss (`step.backward`) or gradient that is not finite, or beyond
        `deviations` of those before, has its step repeated once; if it comes back, `numbers` decides: `skip` the
        batch, `stop`, or `go-on`. Every `checksum_every` steps, ranks that should have the same parameters compare
        them."""
        if not len(self._tracked):
            raise ScriptError("job.watch needs to know the model: call job.track before")
        self._engine.guards.watch(self._tracked, numbers, deviations, checksum_every)

    def barrier(self, timeout: float = 60.0) -> None:
        """Wait until all ranks are here; MissingRanksError after `timeout` seconds names those that are not."""
        if self._engine.is_outside and self._engine.transaction.is_aborted:
            return  # as any collective there
        self._engine.check_outside()
        self._barriers = (self.view, self._barriers[1] + 1 if self._barriers[0] == self.view else 0)
        self._page.move(collectives=self._page.get("collectives") + 1)
        groups.barrier(f"barrier/{self._barriers[1]}", timeout)

    def _start_over(self) -> None:
        """Forget everything that was built; `track` will be told what replaces it."""
        self._tracked = Tracked()
        self._micro_batches = MicroBatches(self._engine, self._tracked)
        forget_values(self.values)
        self._is_declared = False
        self._ignored.clear()
        self._end_checks()
        self._sources.clear()
        self._canonical = self._engine.coordinates = None
        self._is_unwinding = self._is_looping = False
        self._attempt = self._engine.stage = 0
        self._engine.start_over(self._tracked)

    # --- a step's own business

    def _before_update(
        self, optimizer: Any, positional: Sequence[Any] = (), named: Mapping[str, Any] | None = None
    ) -> None:
        """Do what precedes `optimizer.step`, given what it was called with, the optimizer itself first."""
        if self._engine.is_stepping:
            if self._canonical is not None:
                self._canonical.before_update()
            self._engine.guards.measure()
            computes = any(callable(value) for value in (*positional[1:], *(named or {}).values()))
            self._engine.before_update(optimizer, computes=computes)

    def _end_checks(self) -> None:
        if self._checks is not None:
            self._checks.close()
            self._checks = None

    def _drawing_step(self, iterator: Any) -> int | None:
        """Return the step to which what a DataLoader's iterator gives now belongs; None where that does not matter."""
        if self._checks is None or self._checks.ignores_data(iterator):
            return None
        return self._engine.next_step

    def _begin_step(self, step: Step) -> None:
        self._enter_session_code()
        self._engine.begin_step()
        self._micro_batches.begin_step()
        if self._checks is not None:
            self._checks.begin_step(self._engine.is_fresh_start)
        if self._canonical is not None:
            self._canonical.begin_step(step.number, self._engine.seed)

    def _end_step(self, step: Step, error: BaseException | None) -> bool:
        set_gradient_sync(self._tracked.modules().values(), True)
        self._is_unwinding = True  # until it is known to be otherwise
        if error is None and self._checks is not None:
            has_updated = self._engine.transaction.has_updated
            self._checks.end_body(has_updated, [one for source in self._sources.values() for one in source.origins])
            if has_updated and self._sizing.saw_update():
                self._engine.report_changes()
        try:
            is_repeated = self._engine.end_step(error)
        except Reenter:
            self._uncertain_step = step
            raise
        if is_repeated:
            self._attempt += 1
            if self._checks is not None:
                self._checks.aborted(step.number)
            self._micro_batches.end_attempt(error)
            for feed in self._sources.values():
                feed.undo(step.number)
        elif error is None:
            self._attempt = 0
            self._micro_batches.forget()
            self._committed(step)
        self._is_unwinding = error is not None and not is_repeated
        self._engine.is_outside = True
        groups.answer_locally(is_repeated)
        return is_repeated

    def _committed(self, step: Step) -> None:
        self._record_values(step)
        self._engine.is_outside = True  # a rank that dies before its functions are called is not repaired here
        step._committed()
        self._engine.is_outside = False

    def _leave_outside(self, step: Step) -> None:
        """Deal with what the code after the step's `with` has done."""
        if self._is_unwinding:
            raise ScriptError(
                f"step {step.number} was left by an error that the script caught outside of `with step:`: the step is"
                " neither committed nor undone. Catch it inside, or raise hf.RetryableError there to have the step"
                " repeated"
            )
        is_aborted = self._engine.leave_outside()
        if is_aborted and not step.is_asked:
            warn_of_repeats(step.number, sys._getframe(1).f_back)  # the generator's caller: the loop

    def _record_loss(self, loss: Any) -> None:
        self._engine.guards.record_loss(loss)

    def _complete_last(self) -> None:
        step, self._uncertain_step = self._uncertain_step, None
        if step is not None and step.number < self._engine.next_step:
            self._committed(step)

    def _log_late(self, step: Step, values: dict[str, float]) -> None:
        warn_once("log", "step.log is called after `with step:`, where it is too late for a checkpoint: call it inside")
        step.values |= values
        self._write_values(step, values)

    def _record_values(self, step: Step) -> None:
        step.values = step.sums | step.values
        self.logged = self._engine.logged = step.values
        if LOSS in step.values:
            self._page.set_loss(step.values[LOSS])
        self._write_values(step, step.values)

    def _write_values(self, step: Step, values: dict[str, float]) -> None:
        error_file = os.environ.get(ERROR_FILE_VARIABLE, "")
        if values and error_file:
            line = {"step": step.number, "rank": self.rank, "view": self.view} | values
            with Path(error_file).with_name(STEP_LOG).open("a") as file:
                file.write(json.dumps(line) + "\n")

    def _batches(self, step: Step, data: Any, weight: Weight | None) -> Iterator[Any]:
        """Yield the batches of a step. While one is fetched the page says so: a source may be slow."""
        if not step._draws_first(data):
            warn_once(
                "batches",
                "step.batches is called again for the same data in one step, which gives the same batches again: for"
                " several others in a step, give the loader a larger batch, or an hf.Loader slots",
            )
        source = self._source_batches(step, data, weight)
        try:
            while (batch := self._fetch(source)) is not _END:
                yield batch
        finally:
            source.close()

    def _fetch(self, source: Iterator[Any]) -> Any:
        self._page.move(reading=1)
        try:
            return next(source, _END)
        finally:
            self._page.move(reading=0)

    def _source_batches(self, step: Step, data: Any, weight: Weight | None) -> Generator[Any, None, None]:
        if self._canonical is not None:
            self._canonical.check(data)
        if not hasattr(data, "step_batches"):
            if weight is not None:
                raise ScriptError("weight= needs an hf.Loader or an hf.Stream, which know all of a step's batches")
            source, self._engine.drawing = self._source(step, data), type(data).__name__
            try:
                batch = source.batch(step.number)
            finally:
                self._engine.drawing = ""
            self._engine.set_generators(step.number)  # as if nothing had been drawn: a repeated step draws nothing
            yield batch
            return
        if not self._is_tracked(data):
            raise ScriptError("the loader is not tracked: name it in job.track(data=…), so that its position is kept")
        self._sizing.saw_shared()
        if self._canonical is not None:
            loop = self._micro_batches.loop(step, data, has_tree=True)
            yield from self._canonical.batches(step, data, self._engine.seed, weight, loop)
            return
        modules, loop = self._tracked.modules().values(), self._micro_batches.loop(step, data)
        for batch in data.step_batches(weight=weight):
            if not loop.begins():
                continue
            set_gradient_sync(modules, data.is_last_of_step)
            step._uses(data.loss_scale)
            self._engine.set_generators(step.number, data.slot)
            yield batch

    def _source(self, step: Step, data: Iterable[Any]) -> IterableSource:
        """Return the source for an iterable. One that keeps its own position, and is tracked, is where it should be;
        any other starts at its beginning."""
        if id(data) not in self._sources:
            if self._sizing.saw_source(data):
                self._engine.report_changes()
            self._sizing.check_size(self._tracked, self.world_size)
            is_tracked = self._is_tracked(data)
            drawn = step.number if is_tracked else 0
            prepare = self._engine.set_generators
            self._sources[id(data)] = IterableSource(data, drawn, is_tracked=is_tracked, prepare=prepare)
        return self._sources[id(data)]

    def _is_tracked(self, thing: Any) -> bool:
        return any(thing is other for other in self._tracked.others().values())
