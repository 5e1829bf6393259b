"""Whether ranks that count as replicas have the same numbers, looked at in a run's first steps and after a recovery.

Where a state comes from after a fault follows from what the model is: of a replicated model, from any other rank; of a
sharded one, from a rank with the same shard (core/shard_map.py). A script may hold other things on
each rank behind equal names and shapes: experts or stages of its own, parameters that are averaged only now and then, a
meter. A replacement would get another rank's, and the run would end with other numbers. So, in the first steps of a run
and at its first update, these ranks compare a digest of each tracked object: its structure and plain values, and the
bits of its tensors. What is tracked as each rank's own is left out.

Two exchanges of a few numbers: are the names the same, then the digests. If these differ, one more finds the tensor.

After a recovery they compare again: in the second commit of the view, so that no recovery waits for it, in the 4th, the
8th, the 16th and so on, and behind the last step. Ranks that were the same until then differ if the script's updates
depend on something that is not tracked: a counter of its own, which goes on in a survivor and begins again in a
replacement. (Whether they update at all, and their learning rates, are compared at every commit: engine.CommitVote.)

Plain attributes of modules and optimizers may differ (state/attributes.py): those that do are each rank's own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.optim import Optimizer

from holdfast.core.shard_map import ALL_OF_IT, ShardMap
from holdfast.core.stacks import ranks_text
from holdfast.errors import ScriptError
from holdfast.state.optimizers import is_split
from holdfast.state.per_rank_state import StatePart
from holdfast.state.tensor_specs import FlatTree, dotted
from holdfast.state.tracked import FLAGS, GENERATORS, GRADIENTS, TRANSIENT, Tracked
from holdfast.state.tree import flatten
from holdfast.util.logs import get_logger
from holdfast.worker.param_checksums import checksum

STEPS_MIN = 2
"""How many of a run's first steps are compared; more, until one has made an update."""
BITS = 62
"""Of a digest: it travels as a signed number of 64 bits."""

PATH_BYTES_MAX = 200
"""Of the name of a tensor in a refusal."""

COMMITS_AFTER_JOIN = 2
"""In which commit of a view that some have joined ranks compare first: an update made together lies before it in any
case, and the first one is what a recovery waits for. After it, whenever their number has doubled: what is not tracked
may come into effect late."""

log = get_logger(__name__)

Gather = Callable[[Sequence[int]], list[list[int]]]


class Due(IntEnum):
    """Why ranks compare in a commit. Of several reasons the highest counts."""

    NOT = 0
    AFTER_JOIN = 1
    FIRST_STEPS = 2


class ReplicaCheck:
    """The comparisons of one run: in its first steps, and after each recovery."""

    def __init__(self) -> None:
        self._steps = 0
        self._has_updated = False
        self._is_wanted = False
        self._joined_for = 0
        """Commits since a view was joined in which others went on."""
        self._joined_at = -1
        """The step that was the next one then; -1: there was none."""

    @property
    def due(self) -> Due:
        """Return whether the commit of the step under way is to compare. Of a run's first steps only ranks know that
        have been there from its start; the others learn it from the vote (engine.CommitVote)."""
        if self._is_wanted and (self._steps < STEPS_MIN or not self._has_updated):
            return Due.FIRST_STEPS
        commit = self._joined_for + 1  # the one under way
        is_due = self._joined_at >= 0 and commit >= COMMITS_AFTER_JOIN and commit.bit_count() == 1
        return Due.AFTER_JOIN if is_due else Due.NOT

    @property
    def joined_at(self) -> int:
        """The step with which the view began that was joined while others went on; -1: all began together."""
        return self._joined_at

    def joined(self, step: int) -> None:
        """Record that a view was joined while others went on: all have been given the state before this step."""
        self._joined_for, self._joined_at = 0, step

    def committed(self) -> None:
        """Record that a step is about to be committed, and that what was due was compared."""
        self._joined_for += 1

    def want(self) -> None:
        """Have the first steps compared: all ranks start a run together."""
        self._is_wanted, self._steps, self._has_updated = True, 0, False
        self._joined_for, self._joined_at = 0, -1

    def compare(self, tracked: Tracked, has_updated: bool, shard_map: ShardMap, gather: Gather) -> None:
        """Compare the state, on all ranks together. Raises ScriptError, on all of them, if ranks with the same shard
        differ."""
        self._steps += 1
        self._has_updated |= has_updated
        part_attributes(tracked, shard_map, gather)
        branches = {name: flatten(localised(branch)) for name, branch in branches_of(tracked).items()}
        check_names(list(branches), gather)
        rows = gather([number for flat in branches.values() for number in digests(flat)])
        for index, (name, flat) in enumerate(branches.items()):
            structures = [row[2 * index] for row in rows]
            if pair := first_pair(structures, shard_map):
                raise ScriptError(self._sentence(name, "its structure or a plain value in it", pair, tracked))
            if pair := first_pair([row[2 * index + 1] for row in rows], shard_map):
                raise ScriptError(self._sentence(name, self._tensor(flat, pair, gather), pair, tracked))

    def _sentence(self, name: str, what: str, pair: tuple[int, int], tracked: Tracked) -> str:
        if self._joined_at < 0:
            return sentence(name, what, pair, tracked)
        return (
            f"{name} is not the same on {ranks_text(pair)} ({what}) since step {self._joined_at}, from which they went"
            " on together after a fault: the step depends on something that is not tracked and is neither put back when"
            " a step is repeated nor given to a replacement, such as a counter of the script's own. Derive it from"
            " step.number, or name its object in job.track(…), or in job.track_local(…) if each rank has its own"
        )

    def _tensor(self, flat: FlatTree, pair: tuple[int, int], gather: Gather) -> str:
        """Return the path of the first tensor in which two ranks differ, as they name it: other shards have other
        tensors."""
        longest = max(length for (length,) in gather([len(flat.tensors)]))
        sums = [checksum([tensor]) for tensor in flat.tensors]
        rows = gather([*sums, *[0] * (longest - len(sums))])
        first, second = (rows[rank] for rank in pair)
        differing = next(index for index in range(longest) if first[index] != second[index])
        assert flat.specs is not None  # what flatten() made has them
        path = dotted(flat.specs[differing].path[1:]) if differing < len(sums) else ""
        shown = path.encode()[:PATH_BYTES_MAX]
        said = gather([*shown, *[0] * (PATH_BYTES_MAX - len(shown))])[pair[0]]
        return bytes(said).rstrip(b"\0").decode(errors="replace")


def branches_of(tracked: Tracked) -> dict[str, Any]:
    """Return what is compared, by tracked name. Gradients of an accumulation are no part of it: each rank has its own
    until they are averaged."""
    tree = tracked.tree(StatePart.SHARED)
    left_out = tree.pop(TRANSIENT, {})
    flags = tree.pop(FLAGS, {})
    tree[FLAGS] = {kind: values for kind, values in flags.items() if kind != "of_each_rank"}
    split = {name for name, optimizer in tracked.optimizers().items() if is_split(optimizer)}  # meant to differ
    return {
        name: {"state": branch, "buffers outside its state_dict()": left_out.get(name, {})}
        for name, branch in tree.items()
        if name not in (GRADIENTS, GENERATORS) and name not in split
    }


def part_attributes(tracked: Tracked, shard_map: ShardMap, gather: Gather) -> None:
    """Leave plain attributes that differ between ranks with the same shard out of the state."""
    attributes = tracked.flags.attributes
    changed = attributes.changed()
    found = {f"{holder}.{name}": value for holder, values in changed.items() for name, value in sorted(values.items())}
    rows = gather([number_of("\n".join(found).encode())])
    if first_pair([row[0] for row in rows], shard_map):
        differing = list(found)
    elif first_pair([row[0] for row in rows], ALL_OF_IT) or not found:
        return  # of sharded models each rank has its own copies
    else:
        rows = gather([number_of(repr(value).encode()) for value in found.values()])
        differing = [name for index, name in enumerate(found) if first_pair([row[index] for row in rows], shard_map)]
    if differing:
        attributes.of_each_rank |= set(differing)
        log.warning(
            "attribute-differs",
            f"{', '.join(differing)}: an attribute with another value on each rank. A repeated step finds its own, but"
            " a replacement has what its script builds. If it decides anything, make it a buffer, or derive it from"
            " step.number",
        )


def localised(value: Any) -> Any:
    """Return the value with this rank's part in place of each DTensor, which knows its coordinate in the mesh, another
    one for each replica."""
    match value:
        case DTensor():
            return value.to_local()
        case dict():
            return {key: localised(inner) for key, inner in value.items()}
        case list() | tuple() if type(value) in (list, tuple):
            return type(value)(localised(inner) for inner in value)
        case _:
            return value


def digests(flat: FlatTree) -> tuple[int, int]:
    """Return two numbers: of the structure and its plain values, and of all bits of all tensors."""
    return number_of(flat.skeleton), checksum(flat.tensors)


def number_of(content: bytes) -> int:
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big") >> (64 - BITS)


def check_names(names: list[str], gather: Gather) -> None:
    """Raise ScriptError if the ranks have tracked different names."""
    rows = gather([number_of("\n".join(names).encode())])
    if pair := first_pair([row[0] for row in rows], ALL_OF_IT):
        here = ", ".join(name for name in names if name != FLAGS)
        raise ScriptError(
            f"{ranks_text(pair)} track different names, or in another order (here: {here}): call job.track"
            " with the same names on every rank"
        )


def first_pair(values: list[int], shard_map: ShardMap) -> tuple[int, int] | None:
    """Return the first two ranks that have the same shard and different values."""
    firsts: dict[int, int] = {}
    for rank, value in enumerate(values):
        first = firsts.setdefault(shard_map.shard_of(rank), rank)
        if value != values[first]:
            return first, rank
    return None


def sentence(name: str, what: str, pair: tuple[int, int], tracked: Tracked) -> str:
    """Return what is wrong, and what to do about it."""
    fact = (
        f"{name} is not the same on {ranks_text(pair)} ({what}): ranks that hold different numbers cannot replace one"
        " another"
    )
    match tracked.objects().get(name):
        case None if name == FLAGS:
            fact = f"a flag of a module or a setting of torch is not the same on {ranks_text(pair)}"
            remedy = "switch it on all ranks alike: train(), eval(), requires_grad_(), the default dtype"
        case Module():
            remedy = (
                "wrap the model in DistributedDataParallel or build it from one seed; for buffers, leave"
                " broadcast_buffers on or use SyncBatchNorm; what is each rank's own belongs into"
                f" job.track_local({name}={name}). Where a model is cut by hand (experts, stages, tensor parallel),"
                " declare how: hf.init(mesh={'dp': 2, 'ep': 2}, replicated='dp'). Local SGD cannot be repaired online:"
                " run such a script without a session"
            )
        case Optimizer():
            remedy = (
                "the ranks must make the same updates, with gradients that are averaged over all of them; an optimizer"
                " that keeps other state on each rank cannot be repaired online yet: run it without a session"
            )
        case _:
            remedy = f"if each rank is to have its own, track it with job.track_local({name}=…)"
    return f"{fact}: {remedy}"
