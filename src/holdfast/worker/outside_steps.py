"""The code in the loop of the steps that is not inside `with step:`. It runs once per attempt of a step.

    for step in job.steps(n):
        …                          # before: undone with the step (the state is remembered when the step is handed out)
        with step:
            …
        scheduler.step()           # after: counts if the step was committed; else it is put back before the repeat
        ema.update_parameters(model)

Python gives `__exit__` no way to skip the rest of the loop's body, so after an aborted attempt this code sees the state
from before the step, and may change it. Schedulers, buffers and the like are cheap to remember and are put back in any
case (`Tracked.volatile`). Parameters are put back from a copy, which is made at an abort for those that were seen to
change outside of a step before, and in the first steps for modules that no optimizer owns (averaged models). What
changes outside for the first time after an aborted attempt, and was not copied, is refused.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterable, Iterator
from types import FrameType

import torch

from holdfast.data.batch_source import BatchSource
from holdfast.errors import ScriptError, UsageError
from holdfast.state.dtensors import local_of
from holdfast.state.optimizers import parameters_of, settings_of
from holdfast.state.tracked import Tracked
from holdfast.state.tree import flatten
from holdfast.torch_compat import version_of
from holdfast.util.logs import get_logger

FIRST_STEPS = 2
"""Steps at the start of a run during which it is not known yet what changes outside of a step."""
NOT_REFUSED = ("attributes", "of_each_rank")
"""Of flags: attributes are mostly there to be looked at, and too often set between two steps."""
FRAMES_MAX = 10
"""How far up the stack the loop of the steps is looked for: a progress bar may stand in between."""

log = get_logger(__name__)
_has_warned = False


class OutsideChanges:
    """What code outside of the steps changes of the tensors that only an update should change."""

    def __init__(self, tracked: Tracked) -> None:
        self._tracked = tracked
        self._versions: list[tuple[torch.Tensor, int]] = []
        """Of the parameters at the end of the last committed step."""
        self._moving: set[int] = set()
        """id() of the parameters that were seen to change outside of a step."""
        self._observed = 0
        self._undone: list[tuple[torch.Tensor, int, torch.Tensor | None]] = []
        """At the end of an aborted attempt: each tensor, its version, and a copy where one may be needed."""

    def committed(self) -> None:
        """Record that a step is over: code outside may change parameters now."""
        self._versions = [(tensor, version_of(tensor)) for tensor in self._tracked.parameters()]

    def observe(self) -> None:
        """Learn what the code outside changes, after a committed step."""
        self._observed += 1
        self._moving |= {id(tensor) for tensor, version in self._versions if version_of(tensor) != version}
        self._versions = []

    def undone(self) -> None:
        """Save what the code outside may change, after an attempt was aborted and undone."""
        copied = set(self._moving)
        if self._observed < FIRST_STEPS:
            copied |= _without_optimizer(self._tracked)
        self._undone = [
            (tensor, version_of(tensor), local_of(tensor).clone() if id(tensor) in copied else None)
            for tensor in (*self._tracked.parameters(), *_states_of(self._tracked))
        ]

    def put_back(self) -> None:
        """Put back what the code outside has changed after an aborted attempt. Raises UsageError for what cannot be put
        back."""
        undone, self._undone = self._undone, []
        names = self._tracked.parameter_names()
        with torch.no_grad():
            for tensor, version, copy in undone:
                if version_of(tensor) == version:
                    continue
                if copy is None:
                    name = names.get(id(tensor), "a parameter or optimizer state")
                    raise UsageError(
                        f"code outside of `with step:` changed {name} after an attempt of the step was aborted, and it"
                        " cannot be put back: change it inside `with step:`, or under `if step.is_committed:`"
                    )
                local_of(tensor).copy_(copy)


def _without_optimizer(tracked: Tracked) -> set[int]:
    """id() of the parameters of modules that no optimizer has any parameter of."""
    owned = {id(item) for optimizer in tracked.optimizers().values() for item in parameters_of(optimizer)}
    modules = [{id(item) for item in module.parameters()} for module in tracked.modules().values()]
    return {item for items in modules if not items & owned for item in items}


def _states_of(tracked: Tracked) -> Iterator[torch.Tensor]:
    """Return the optimizers' state."""
    for optimizer in tracked.optimizers().values():
        for parameter in parameters_of(optimizer):
            entry = optimizer.state.get(parameter)
            if isinstance(entry, dict):
                yield from (value for value in entry.values() if isinstance(value, torch.Tensor))


class ReplicaFreshness:
    """A comparison of the state that replicas in other ranks are copies of with the state the next step begins with.

    Replicas are made before a step is committed. What code outside changes afterwards would be missing in them.
    """

    def __init__(self, tracked: Tracked) -> None:
        self._tracked = tracked
        self._seen: dict[str, object] = {}

    def committed(self) -> None:
        """Record that a step is over, and its replicas are made."""
        self._seen = self._look()

    def compare(self) -> None:
        """Raise ScriptError if code outside has changed something since."""
        if self._seen and (changed := [name for name, value in self._look().items() if self._seen.get(name) != value]):
            raise ScriptError(
                f"{', '.join(changed)} was changed outside of `with step:`: the state of a sharded model is replicated"
                " to other ranks when a step is committed, and they would not have the change; move it into the `with`"
            )
        self._seen = {}

    def _look(self) -> dict[str, object]:
        """Return what tells whether tracked objects were changed, by name. Loaders are compared by themselves at each
        commit."""
        found: dict[str, object] = {
            name: flatten(thing.state_dict()).skeleton
            for name, thing in self._tracked.others().items()
            if not isinstance(thing, BatchSource)
        }
        flags = self._tracked.flags.changed()
        found["a flag of a module, a parameter or the process"] = {
            kind: values for kind, values in flags.items() if kind not in NOT_REFUSED
        }
        for name, module in self._tracked.modules().items():
            found[name] = [version_of(tensor) for tensor in module.parameters()]
        for name, optimizer in self._tracked.optimizers().items():
            found[name] = flatten([settings_of(group) for group in optimizer.param_groups]).skeleton
        return found


# --- the warning


def warn_of_repeats(number: int, frame: FrameType | None) -> None:
    """Warn once per process that code after the `with` ran for an aborted attempt too. `frame` holds the loop, or was
    called by what does. Where there is no source, there is no warning."""
    global _has_warned
    if _has_warned or (place := _code_after(frame)) is None:
        return
    _has_warned = True
    log.warning(
        "code-after-step-repeated",
        f"step {number} is repeated, and the code after `with step:` ({place}) has run for the aborted attempt too: it"
        " runs once per attempt. Put what must happen once per step into step.after_commit(function), or under"
        " `if step.is_committed:`",
    )


def _code_after(frame: FrameType | None) -> str | None:
    """Return where the first statement is that follows the step's `with` in its loop: "train.py:42"."""
    for _ in range(FRAMES_MAX):
        if frame is None:
            return None
        if (loop := _loop_at(frame)) is not None:
            following = _following(loop)
            return f"{frame.f_code.co_filename}:{following.lineno}" if following is not None else None
        frame = frame.f_back
    return None


def _loop_at(frame: FrameType) -> ast.For | None:
    """Return the loop of the steps that the frame is at the head of."""
    source = "".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals))
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return None
    line = frame.f_lineno
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For) and _covers(node.iter, line)]
    return next((loop for loop in reversed(loops) if _with_of(loop) is not None), None)


def _covers(node: ast.expr, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _with_of(loop: ast.For) -> ast.With | None:
    """Return the `with step:` inside, of the loop's own variable."""
    names = {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)}
    for node in ast.walk(loop):
        if isinstance(node, ast.With) and any(
            isinstance(item.context_expr, ast.Name) and item.context_expr.id in names for item in node.items
        ):
            return node
    return None


def _following(loop: ast.For) -> ast.stmt | None:
    """Return the first statement that runs after the `with`, in the same round of the loop."""
    block = _with_of(loop)

    def search(body: Iterable[ast.stmt]) -> tuple[bool, ast.stmt | None]:
        statements = list(body)
        for index, statement in enumerate(statements):
            if statement is not block and not any(node is block for node in ast.walk(statement)):
                continue
            found: ast.stmt | None = None
            if statement is not block:
                inner = [getattr(statement, field, []) for field in ("body", "orelse", "handlers", "finalbody")]
                found = next((after for part in inner if (after := search(part)[1]) is not None), None)
            rest = [one for one in statements[index + 1 :] if not _is_nothing(one)]
            return True, found or (rest[0] if rest else None)
        return False, None

    return search(loop.body)[1]


def _is_nothing(statement: ast.stmt) -> bool:
    is_constant = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return is_constant or isinstance(statement, ast.Pass | ast.Continue)
