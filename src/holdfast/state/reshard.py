"""The state of S old shards into the live objects of a world of any size: FSDP2 to FSDP2, to DDP, from DDP, HSDP.

The old shards are known by their skeletons; their tensors stay where they are (a peer, a file, memory) until they are
moved. Tensors are found by name, never by position. Each old piece lies in a region of the whole, and so does what this
rank needs; which pieces meet it, and where, is asked of torch's own planner. Only what meets is moved. So no tensor is
ever whole in memory, unless this rank's part is the whole.

    modules       filled where they are
    optimizers    the state is made as the parameter is cut: a value of the parameter's shape is a cut one, any other
                  (Adam's `step`) is the same on every rank
    others        as the first shard has them; they are the same on every rank
    gradients     of an accumulation: cut as their parameter is

Shards that hold the same region (HSDP's replicas) stand in for one another: `shards` may lack some.

It is done in two passes, so that whoever moves may do it all at once in between (loading.py): first room is made and
the moves are asked for, in an order that is the same every time; then what has been filled is given to the objects.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn import Module

from holdfast.errors import StateError
from holdfast.state.modules import EXTRA, load_transient, unwrapped
from holdfast.state.optimizers import load_optimizer
from holdfast.state.sharded import Layout, Sharded, layout_of, local_of, region
from holdfast.state.tracked import GRADIENTS, TRANSIENT, Tracked
from holdfast.state.tree import Path, Spec, dotted, leaf_value, sketch

Fetch = Callable[[int, int], torch.Tensor]
"""(shard, number of the tensor in it) → the tensor."""
Region = tuple[slice, ...]
Finish = Callable[[], Any]
"""What is left to do when everything was moved."""


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A tensor of the first shard, in its tree."""

    spec: Spec
    index: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor of one shard, or some rows of it: where it lies in the whole."""

    shard: int
    index: int
    spec: Spec
    region: Region
    rows: slice
    """Which rows of the shard's tensor it is."""
    origin: Any = None
    """Where to get it from, for whoever moves it."""

    @property
    def size_bytes(self) -> int:
        return _volume(self.region) * self.spec.dtype.itemsize


class Old:
    """The old shards: who has which region of which tensor. How it is moved is a subclass's."""

    is_dry = False
    """Whether nothing is loaded: it is only found out what would be moved."""

    def __init__(self, shards: Mapping[int, bytes]) -> None:
        if not shards:
            raise StateError("there is no shard to reshard from")
        self._pieces: dict[Path, dict[tuple[tuple[int, int], ...], list[Piece]]] = {}
        self._firsts: dict[int, list[Piece]] = {}
        self._first = min(shards)
        for shard in sorted(shards):
            tree = sketch(shards[shard], partial(self._note, shard))
            if shard == self._first:
                self.tree = tree

    def pieces_of(self, shard: int, index: int, spec: Spec, lies: Region) -> list[Piece]:
        """The pieces that a shard's tensor is in."""
        return [Piece(shard, index, spec, lies, slice(0, spec.shape[0] if spec.shape else 1))]

    def move(self, piece: Piece, inside: Region, target: torch.Tensor) -> None:
        """Copy what lies inside of a piece into the target: now, or before the second pass."""
        raise NotImplementedError

    def _note(self, shard: int, index: int, spec: Spec) -> _Leaf:
        lies = _everything(spec.shape) if spec.layout is None else region(spec.layout)
        if tuple(part.stop - part.start for part in lies) != spec.shape:
            raise StateError(f"{dotted(spec.path)} of shard {shard} has not the shape that its place in the mesh gives")
        known, key = self._pieces.setdefault(spec.path, {}), tuple((part.start, part.stop) for part in lies)
        if key not in known:
            known[key] = self.pieces_of(shard, index, spec, lies)
        if shard == self._first:
            self._firsts[index] = known[key]
        return _Leaf(spec, index)

    def value(self, leaf: _Leaf) -> Any:
        """A leaf that is the same on every rank."""
        if leaf.spec.layout is not None:
            raise StateError(f"{dotted(leaf.spec.path)} is a shard, where only what is the same everywhere can be kept")
        made = torch.empty(leaf.spec.shape, dtype=leaf.spec.dtype)
        for piece in self._firsts[leaf.index]:
            inside = tuple(slice(0, part.stop - part.start) for part in piece.region)
            self.move(piece, inside, made[piece.rows] if made.dim() else made)
        return leaf_value(leaf.spec, made)

    def fill(self, target: torch.Tensor, wanted: Region, leaf: _Leaf) -> None:
        """Move what lies in the wanted region of the whole into `target`, piece by piece."""
        pieces = [piece for found in self._pieces[leaf.spec.path].values() for piece in found]
        self._check_cover(pieces, leaf)
        for piece, inside, within in _meeting(pieces, wanted, leaf.spec):
            self.move(piece, inside, target[within])

    def _check_cover(self, pieces: Sequence[Piece], leaf: _Leaf) -> None:
        """All pieces must be cuts of the same whole, and together be all of it."""
        shape = _whole_shape(leaf.spec)
        for piece in pieces:
            if _whole_shape(piece.spec) != shape or piece.spec.dtype != leaf.spec.dtype:
                raise StateError(f"{dotted(leaf.spec.path)} is not the same tensor in every shard")
        if sum(piece.size_bytes for piece in pieces) != math.prod(shape) * leaf.spec.dtype.itemsize:
            raise StateError(f"{dotted(leaf.spec.path)} is not whole in the shards there are: some are missing")


def _meeting(pieces: Sequence[Piece], wanted: Region, spec: Spec) -> Iterator[tuple[Piece, Region, Region]]:
    """The pieces that meet the wanted region, in their order: what of the piece, and where in the wanted region."""
    # Imported when needed: it costs a tenth of a second, and most workers never reshard.
    from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    if not _volume(wanted):
        return
    filled = [piece for piece in pieces if piece.size_bytes]
    saved = TensorStorageMetadata(
        TensorProperties(spec.dtype), torch.Size(_whole_shape(spec)), [_chunk(piece.region) for piece in filled]
    )
    items = create_read_items_for_chunk_list(dotted(spec.path), saved, [_chunk(wanted)])
    for number, item in sorted(((item.storage_index.index or 0, item) for item in items), key=lambda pair: pair[0]):
        inside, within = _slices(item.storage_offsets, item.lengths), _slices(item.dest_offsets, item.lengths)
        yield filled[number], inside, within


def _chunk(lies: Region) -> Any:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    starts, sizes = [part.start for part in lies], [part.stop - part.start for part in lies]
    return ChunkStorageMetadata(torch.Size(starts), torch.Size(sizes))


def _slices(starts: Sequence[int], sizes: Sequence[int]) -> Region:
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


class _Fetched(Old):
    """Old shards whose tensors are fetched whole, one after another."""

    def __init__(self, shards: Mapping[int, bytes], fetch: Fetch) -> None:
        super().__init__(shards)
        self._fetch = fetch

    def move(self, piece: Piece, inside: Region, target: torch.Tensor) -> None:
        source = self._fetch(piece.shard, piece.index)
        _check_fetched(source, piece.spec)
        with torch.no_grad():
            target.copy_(source[inside])


class _Noted(Old):
    """Old shards of which nothing is moved, only noted."""

    is_dry = True

    def __init__(self, shards: Mapping[int, bytes]) -> None:
        super().__init__(shards)
        self.notes: list[tuple[int, int]] = []

    def move(self, piece: Piece, inside: Region, target: torch.Tensor) -> None:
        self.notes.append((piece.shard, piece.index))


def reshard(shards: Mapping[int, bytes] | Sequence[bytes], fetch: Fetch, tracked: Tracked) -> None:
    """Load the state of old shards, given by their skeletons, into objects that may be cut otherwise, or not at all."""
    for finish in ask(_Fetched(_numbered(shards), fetch), tracked):
        finish()


def needed(shards: Mapping[int, bytes] | Sequence[bytes], tracked: Tracked) -> list[tuple[int, int]]:
    """What `reshard` would fetch for the same objects, (shard, number of the tensor), in that order."""
    old = _Noted(_numbered(shards))
    ask(old, tracked)
    return old.notes


def ask(old: Old, tracked: Tracked) -> list[Finish]:
    """The first pass; the second is to call what is returned, in order."""
    tracked.check_names(old.tree)
    finish: list[Finish] = []
    left_out = old.tree.get(TRANSIENT, {})
    for name, module in tracked.modules().items():
        finish += _fill_module(old, module, old.tree[name], name)
        finish.append(partial(load_transient, module, _values(old, left_out.get(name, {}))))
    for name, thing in tracked.others().items():
        live = thing.state_dict() if _has_cuts(old.tree[name]) else None
        finish.append(partial(thing.load_state_dict, _like(old, old.tree[name], live)))
    names = tracked.parameter_names()
    parameters = {names[id(item)]: item for item in tracked.parameters() if id(item) in names}
    for name, optimizer in tracked.optimizers().items():
        made = _optimizer_state(old, old.tree[name], parameters)
        if not old.is_dry:  # or what was made for nothing would be held in memory all together
            finish.append(partial(load_optimizer, optimizer, made, names, name, is_ours=True))
    finish.append(partial(tracked.load_gradients, _gradients(old, tracked)))
    return finish


def _numbered(shards: Mapping[int, bytes] | Sequence[bytes]) -> Mapping[int, bytes]:
    return shards if isinstance(shards, Mapping) else dict(enumerate(shards))


def _fill_module(old: Old, module: Module, saved: Any, path: str) -> list[Finish]:
    finish: list[Finish] = []
    model = unwrapped(module)
    live = model.state_dict()
    if set(live) != set(saved):
        differing = sorted(set(live) ^ set(saved))[0]
        raise StateError(f"{path}.{differing} is only on one side: the model is not the one that was saved")
    for name, value in live.items():
        leaf = saved[name]
        if isinstance(value, torch.Tensor) and isinstance(leaf, _Leaf):
            _fill_live(old, value, leaf, f"{path}.{name}")
        elif name.endswith(EXTRA):
            owner = name.removesuffix(EXTRA).removesuffix(".")
            finish.append(partial(model.get_submodule(owner).set_extra_state, _values(old, leaf)))
        else:
            finish.append(partial(_give_back, model, name, _values(old, leaf)))
    return finish


def _give_back(model: Module, name: str, value: Any) -> None:
    """A value that a hook has put there, to the hook that wants it, if there is one."""
    model.load_state_dict({**model.state_dict(), name: value}, strict=False)


def _fill_live(old: Old, live: torch.Tensor, leaf: _Leaf, path: str) -> None:
    target = local_of(live)
    if tuple(live.shape) != _whole_shape(leaf.spec) or target.dtype != leaf.spec.dtype:
        is_, was = f"{live.dtype} {list(live.shape)}", f"{leaf.spec.dtype} {list(_whole_shape(leaf.spec))}"
        raise StateError(f"{path} is {is_}, saved was {was}")
    old.fill(target, _region_of(live), leaf)


def _optimizer_state(old: Old, saved: Any, parameters: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    state = {
        label: {key: _cut_like(old, value, parameters.get(label)) for key, value in entry.items()}
        for label, entry in saved["state"].items()
    }
    rest = {key: _values(old, value) for key, value in saved.items() if key != "state"}
    return {**rest, "state": state}


def _gradients(old: Old, tracked: Tracked) -> dict[str, Any] | None:
    if (saved := old.tree.get(GRADIENTS)) is None:
        return None
    parameters = dict(enumerate(tracked.parameters()))
    return {label: _cut_like(old, value, parameters.get(int(label))) for label, value in saved.items()}


def _cut_like(old: Old, value: Any, parameter: torch.Tensor | None) -> Any:
    """One value of a parameter's state: cut as the parameter is, if it has its shape."""
    if not isinstance(value, _Leaf):
        return _values(old, value)
    shape = _whole_shape(value.spec)
    is_cut = isinstance(parameter, DTensor) or value.spec.layout is not None
    if parameter is None or tuple(parameter.shape) != shape or not is_cut:
        if value.spec.layout is not None:
            raise StateError(f"{dotted(value.spec.path)} is a shard that does not have its parameter's shape")
        return _values(old, value)
    like = local_of(parameter)
    local = torch.empty(like.shape, dtype=value.spec.dtype, device=like.device)
    old.fill(local, _region_of(parameter), value)
    return Sharded(local, layout_of(parameter)) if isinstance(parameter, DTensor) else local


def _like(old: Old, value: Any, live: Any) -> Any:
    """A value for an object's own load_state_dict; cut ones are cut as the object has them now."""
    if isinstance(value, _Leaf) and isinstance(live, DTensor):
        made = torch.empty_like(live)
        _fill_live(old, made, value, dotted(value.spec.path))
        return made
    if isinstance(value, _Leaf) and value.spec.layout is not None:
        whole = torch.empty(value.spec.layout.shape, dtype=value.spec.dtype)
        old.fill(whole, _region_of(whole), value)
        return whole
    if type(value) is dict:
        known = live if isinstance(live, dict) else {}
        return {key: _like(old, item, known.get(key)) for key, item in value.items()}
    if type(value) in (list, tuple):
        beside = live if isinstance(live, list | tuple) and len(live) == len(value) else [None] * len(value)
        return type(value)(_like(old, item, other) for item, other in zip(value, beside, strict=True))
    return _values(old, value)


def _values(old: Old, value: Any) -> Any:
    """The value with its tensors, for what is the same on every rank."""
    if isinstance(value, _Leaf):
        return old.value(value)
    if type(value) is dict:
        return {key: _values(old, item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_values(old, item) for item in value)
    return value


def _has_cuts(value: Any) -> bool:
    items = value.values() if type(value) is dict else value if type(value) in (list, tuple) else ()
    is_cut = isinstance(value, _Leaf) and value.spec.layout is not None
    return is_cut or any(_has_cuts(item) for item in items)


def _whole_shape(spec: Spec) -> tuple[int, ...]:
    return spec.shape if spec.layout is None else spec.layout.shape


def _region_of(live: torch.Tensor) -> Region:
    layout: Layout | None = layout_of(live) if isinstance(live, DTensor) else None
    return _everything(live.shape) if layout is None else region(layout)


def _everything(shape: Sequence[int]) -> Region:
    return tuple(slice(0, size) for size in shape)


def _volume(lies: Region) -> int:
    return math.prod(part.stop - part.start for part in lies)


def _check_fetched(tensor: torch.Tensor, spec: Spec) -> None:
    if tensor.dtype != spec.dtype or tuple(tensor.shape) != spec.shape:
        got, said = f"{tensor.dtype} {list(tensor.shape)}", f"{spec.dtype} {list(spec.shape)}"
        raise StateError(f"{dotted(spec.path)} was fetched as {got}, its skeleton says {said}")
