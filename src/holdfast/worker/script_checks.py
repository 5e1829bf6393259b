"""What is looked at in the first steps of a session, so that a script for which the promises cannot be kept is refused
with a sentence instead of ending with other numbers.

    at the first step                  something is tracked; DDP's communication hooks have no state (wrappers.py); what
                                       DDP wraps is tracked with its wrapper
    whenever an optimizer updates      it is tracked
    around the first step, and the     nothing else that changes is left out of `job.track` (untracked.py); only at a
    first that makes an update         fresh start, so that a recovery does not wait for it
    at its commits                     ranks that count as replicas have the same numbers (replica_check.py)
    whenever a DataLoader is drawn     not by hand over several steps (hand_drawn_batches.py)
    in the first step, and whenever    a warning of numbers and lists of the script's own that it changes from what
    one is repeated                    they were (own_counters.py)
    whenever an hf.Loader is looped    through step.batches
    over
    whenever any other source is       it does not communicate
    drawn from

Under torchrun, or alone, nothing is repaired, so nothing of this is asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any

from torch.amp.grad_scaler import GradScaler
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from holdfast.data.batch_source import BatchSource
from holdfast.errors import ScriptError, StateError
from holdfast.state.tracked import Tracked
from holdfast.torch_compat import is_iterator_of, never_compiled
from holdfast.util.logs import get_logger
from holdfast.worker.own_counters import OwnCounters
from holdfast.worker.parallel.wrappers import not_among, refuse_stateful_hooks
from holdfast.worker.silent_updates import refuse_capture
from holdfast.worker.untracked import Known, Survey, check_optimizer, check_parameters, check_wrapper

log = get_logger(__name__)

COUNTERS = (
    "{}, which the script computes from what it was, and which is not tracked: a repeated step changes it once more,"
    " and a replacement begins with its first value. If samples, updates or decisions depend on it, derive it from"
    " step.number, or track it: job.track(updates=0), then job.values.updates += 1, or an object with state_dict and"
    " load_state_dict (job.track_local for a rank's own). If it is only shown, ignore this"
)


class ScriptChecks:
    """The checks of one session, from its first step to the end of its loop."""

    def __init__(self, tracked: Tracked, ignored: Iterable[Any]) -> None:
        self._tracked, self._ignored = tracked, tuple(ignored)
        self._optimizers = {id(optimizer): name for name, optimizer in tracked.optimizers().items()}
        self._checked: dict[int, int] = {}
        """By tracked optimizer: how many groups of parameters it had when they were looked at."""
        self._known: Known | None = None
        self._survey: Survey | None = None
        self._counters: OwnCounters | None = None
        self._is_surveyed = False
        refuse_stateful_hooks(tracked.modules().values())  # of hooks registered since job.track
        for wrapper in not_among(tracked.modules().values()):  # or made since job.track
            check_wrapper(wrapper, Known(tracked, ()), Known(Tracked(), self._ignored))
        for thing in tracked.others().values():
            if isinstance(thing, BatchSource):
                thing.before_pass = refuse_pass
        self._hook = register_optimizer_step_pre_hook(never_compiled(self._before_update))

    def begin_step(self, is_fresh_start: bool) -> None:
        """Check at the start of each step."""
        if is_fresh_start and not self._is_surveyed:
            self._survey = Survey(self.known)
            self._counters = OwnCounters(lambda thing: thing in self.known or self.known.holds(thing))
        self._is_surveyed = True
        if self._counters is not None:
            self._counters.begin()

    def aborted(self, number: int) -> None:
        """Warn, when a step is repeated, of numbers of the script's own that nothing puts back."""
        if self._counters is not None and (names := self._counters.changed()):
            text = COUNTERS.format(", ".join(names))
            warn_once("changed-counter", f"step {number} is repeated, and its aborted attempt has changed {text}")

    def end_body(self, has_updated: bool, drawn: Iterable[Any] = ()) -> None:
        """Check at the end of each step's body, before its commit. `drawn`: what `step.batches` draws from."""
        if self._survey is not None:
            self._survey.check(drawn)
            if text := self._survey.warning():
                warn_once("generator", text)
            if self._counters is not None and (names := self._counters.changed()):
                warn_once("counter", f"this step changes {COUNTERS.format(', '.join(names))}")
            if has_updated:
                self._survey = None

    def ignores_data(self, iterator: Any) -> bool:
        """Return whether the script has declared that the DataLoader of this iterator does not matter."""
        return any(isinstance(thing, DataLoader) and is_iterator_of(thing, iterator) for thing in self._ignored)

    def close(self) -> None:
        """Stop checking, behind the last step."""
        self._hook.remove()
        for thing in self._tracked.others().values():
            if isinstance(thing, BatchSource):
                thing.before_pass = None

    @property
    def known(self) -> Known:
        """Return what is tracked or ignored, with all that is inside."""
        if self._known is None:
            self._known = Known(self._tracked, self._ignored)
        return self._known

    def _before_update(self, optimizer: Optimizer, *_: Any) -> None:
        name = self._optimizers.get(id(optimizer))
        refuse_capture(name or "an optimizer")
        if name is None:
            check_optimizer(optimizer, self.known)
        elif self._checked.get(id(optimizer)) != len(optimizer.param_groups):
            self._checked[id(optimizer)] = len(optimizer.param_groups)
            check_parameters(name, optimizer, self.known)


def check_something_tracked(is_declared: bool) -> None:
    """Raise ScriptError if the script has not said what its state is."""
    if not is_declared:
        raise ScriptError(
            "nothing is tracked: name everything that makes up the state, as in job.track(model=model,"
            " optimizer=optimizer), before the first step; if there is no state, say so with job.track()"
        )


_USUAL_NAMES = ((Module, "model"), (Optimizer, "optimizer"), (LRScheduler, "scheduler"), (GradScaler, "scaler"))


def refuse_unnamed(method: str, things: Sequence[Any]) -> None:
    """Raise ScriptError for objects that are given to `job.track` without names."""
    if not things:
        return
    names: list[str] = []
    for thing in things:
        name = next((name for kind, name in _USUAL_NAMES if isinstance(thing, kind)), "")
        name = name or ("data" if isinstance(thing, BatchSource | DataLoader) else "thing")
        again = sum(other.rstrip("23456789") == name for other in names)
        names.append(f"{name}{again + 1}" if again else name)
    raise ScriptError(
        f"job.{method} takes names, by which a state is found again: write"
        f" job.{method}({', '.join(f'{name}={name}' for name in names)})"
    )


def add_tracked(tracked: Tracked, name: str, thing: Any, *, is_local: bool = False) -> None:
    """Add an object to the state that `job.track` names. Raise ScriptError for one that cannot be part of it: each
    further try would run the same script."""
    if isinstance(thing, dict | list | tuple | set) and not hasattr(thing, "state_dict"):
        raise ScriptError(
            f"{name} is a {type(thing).__name__}, which has no state_dict and no load_state_dict: track what is in it"
            " by name, numbers and words as they are (best=0.0)"
        )
    try:
        tracked.add(name, thing, is_local=is_local)
    except StateError as error:
        raise ScriptError(str(error)) from None


_warned: set[str] = set()


def warn_once(about: str, text: str) -> None:
    """Write a warning into this worker's log, once per process, with the place in the script."""
    if about not in _warned:
        _warned.add(about)
        log.warning(f"script-{about}", f"{text} ({_place_in_script()})")


def warn_of_collective() -> None:
    """Warn of a collective in the loop, outside of its steps."""
    if "collective" not in _warned:
        warn_once(
            "collective",
            "a collective runs between two steps, where it cannot be repeated: a fault there may start all workers"
            " again. Move it into `with step:`",
        )


def refuse_collective_of(source: str) -> None:
    """Raise ScriptError for a source of batches that communicates with other ranks while a batch is drawn."""
    raise ScriptError(
        f"the {source} given to step.batches makes a collective while it hands out a batch, as one prepared by"
        " accelerate does to agree on random numbers: a replacement draws its batches alone, and the other ranks would"
        " not come. Give step.batches an hf.Loader, or a torch DataLoader with a DistributedSampler that was not given"
        " to accelerator.prepare"
    )


def refuse_pass() -> None:
    """Raise ScriptError for a loop over a tracked hf.Loader or hf.Stream itself."""
    raise ScriptError(
        "a tracked loader is looped over directly, so that a step has all batches of an epoch: write `for x, y in"
        " step.batches(data):` inside `with step:`"
    )


def _place_in_script() -> str:
    """Return file and line of the newest frame that is neither torch's nor ours."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in ("torch", "holdfast", "contextlib"):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown place"
