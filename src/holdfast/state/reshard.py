"""The state of S old shards into the live objects of a world of any size: FSDP2 to FSDP2, to DDP, from DDP, HSDP.

The old shards are known by their skeletons; their tensors stay where they are (a peer, a file, memory) until `fetch`
asks for one. Tensors are found by name, never by position. Each old piece lies in a region of the whole, and so does
what this rank needs; only pieces that meet it are fetched, one at a time, and only what meets is copied. So no tensor
is ever whole in memory, unless this rank's part is the whole.

    modules       filled where they are
    optimizers    the state is made as the parameter is cut: a value of the parameter's shape is a cut one, any other
                  (Adam's `step`) is the same on every rank
    others        as the first shard has them; they are the same on every rank

Shards that hold the same region (HSDP's replicas) stand in for one another: `shards` may lack some.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.optim import Optimizer

from holdfast.errors import StateError
from holdfast.state.modules import load_transient, unwrapped
from holdfast.state.optimizers import load_optimizer
from holdfast.state.sharded import Layout, Sharded, layout_of, local_of, region
from holdfast.state.tracked import TRANSIENT, Tracked
from holdfast.state.tree import Flat, Path, Spec, dotted, leaf_value, sketch

Fetch = Callable[[int, int], torch.Tensor]
"""(shard, number of the tensor in it) → the tensor."""
Region = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A tensor of the first shard, in its tree."""

    spec: Spec
    index: int


@dataclass(frozen=True, slots=True)
class _Piece:
    """A tensor of one shard: where it lies in the whole."""

    shard: int
    index: int
    spec: Spec
    region: Region


class _Old:
    """The old shards: who has which region of which tensor."""

    is_dry = False
    """Whether nothing is loaded: it is only found out what would be fetched."""

    def __init__(self, shards: Mapping[int, bytes], fetch: Fetch) -> None:
        if not shards:
            raise StateError("there is no shard to reshard from")
        self._fetch = fetch
        self._pieces: dict[Path, dict[tuple[tuple[int, int], ...], _Piece]] = {}
        self._first = min(shards)
        for shard in sorted(shards):
            tree = sketch(shards[shard], lambda index, spec, shard=shard: self._note(shard, index, spec))  # type: ignore[misc]
            if shard == self._first:
                self.tree = tree

    def _note(self, shard: int, index: int, spec: Spec) -> _Leaf:
        whole = tuple(slice(0, size) for size in spec.shape)
        lies = whole if spec.layout is None else region(spec.layout)
        if tuple(part.stop - part.start for part in lies) != spec.shape:
            raise StateError(f"{dotted(spec.path)} of shard {shard} has not the shape that its place in the mesh gives")
        known = self._pieces.setdefault(spec.path, {})
        known.setdefault(tuple((part.start, part.stop) for part in lies), _Piece(shard, index, spec, lies))
        return _Leaf(spec, index)

    def value(self, leaf: _Leaf) -> Any:
        """A leaf that is the same on every rank."""
        tensor = self._fetch(self._first, leaf.index)
        _check_fetched(tensor, leaf.spec)
        return leaf_value(leaf.spec, tensor)

    def fill(self, target: torch.Tensor, wanted: Region, leaf: _Leaf) -> None:
        """Copy what lies in the wanted region of the whole into `target`, piece by piece."""
        for piece, meets in self._meeting(wanted, leaf):
            source = self._fetch(piece.shard, piece.index)
            _check_fetched(source, piece.spec)
            with torch.no_grad():
                target[_within(meets, wanted)].copy_(source[_within(meets, piece.region)])

    def _meeting(self, wanted: Region, leaf: _Leaf) -> Iterator[tuple[_Piece, list[slice]]]:
        """The pieces that meet the wanted region, and where."""
        pieces = self._pieces[leaf.spec.path].values()
        self._check_cover(pieces, leaf)
        for piece in pieces:
            meets = [
                slice(max(ours.start, theirs.start), min(ours.stop, theirs.stop))
                for ours, theirs in zip(wanted, piece.region, strict=True)
            ]
            if all(part.start < part.stop for part in meets):
                yield piece, meets

    def _check_cover(self, pieces: Any, leaf: _Leaf) -> None:
        """All pieces must be cuts of the same whole, and together be all of it."""
        shape = _whole_shape(leaf.spec)
        covered = 0
        for piece in pieces:
            if _whole_shape(piece.spec) != shape or piece.spec.dtype != leaf.spec.dtype:
                raise StateError(f"{dotted(leaf.spec.path)} is not the same tensor in every shard")
            covered += piece.spec.size_bytes
        if covered != torch.Size(shape).numel() * leaf.spec.dtype.itemsize:
            raise StateError(f"{dotted(leaf.spec.path)} is not whole in the shards there are: some are missing")


def reshard(shards: Mapping[int, bytes] | Sequence[bytes], fetch: Fetch, tracked: Tracked) -> None:
    """Load the state of old shards, given by their skeletons, into objects that may be cut otherwise, or not at all."""
    _load(_Old(shards if isinstance(shards, Mapping) else dict(enumerate(shards)), fetch), tracked)


def needed(shards: Mapping[int, bytes] | Sequence[bytes], tracked: Tracked) -> list[tuple[int, int]]:
    """What `reshard` would fetch for the same objects, (shard, number of the tensor), in that order."""
    old = _Noted(shards if isinstance(shards, Mapping) else dict(enumerate(shards)))
    _load(old, tracked)
    return old.notes


class _Noted(_Old):
    """Old shards of which nothing is fetched, only noted."""

    is_dry = True

    def __init__(self, shards: Mapping[int, bytes]) -> None:
        super().__init__(shards, lambda shard, index: torch.empty(0))
        self.notes: list[tuple[int, int]] = []

    def value(self, leaf: _Leaf) -> Any:
        self.notes.append((self._first, leaf.index))
        return torch.empty(0)

    def fill(self, target: torch.Tensor, wanted: Region, leaf: _Leaf) -> None:
        self.notes += [(piece.shard, piece.index) for piece, _ in self._meeting(wanted, leaf)]


def _load(old: _Old, tracked: Tracked) -> None:
    tracked.check_names(old.tree)
    left_out = old.tree.get(TRANSIENT, {})
    for name, module in tracked.modules().items():
        _fill_module(old, module, old.tree[name], name)
        buffers = _values(old, left_out.get(name, {}))
        if not old.is_dry:
            load_transient(module, buffers)
    for name, thing in tracked.others().items():
        live = thing.state_dict() if _has_cuts(old.tree[name]) else None
        made = _like(old, old.tree[name], live)
        if not old.is_dry:
            thing.load_state_dict(made)
    names = tracked.parameter_names()
    parameters = {names[id(item)]: item for item in tracked.parameters() if id(item) in names}
    for name, optimizer in tracked.optimizers().items():
        _fill_optimizer(old, optimizer, old.tree[name], parameters, names, name)


def fetch_from(flats: Sequence[Flat]) -> Fetch:
    """For shards that are all in memory, or mapped."""
    return lambda shard, index: flats[shard].tensors[index]


def _fill_module(old: _Old, module: Module, saved: Any, path: str) -> None:
    model = unwrapped(module)
    live = model.state_dict()
    if set(live) != set(saved):
        differing = sorted(set(live) ^ set(saved))[0]
        raise StateError(f"{path}.{differing} is only on one side: the model is not the one that was saved")
    for name, value in live.items():
        leaf = saved[name]
        if isinstance(value, torch.Tensor) and isinstance(leaf, _Leaf):
            _fill_live(old, value, leaf, f"{path}.{name}")
        else:
            owner = name.removesuffix("_extra_state").removesuffix(".")
            extra = _values(old, leaf)
            if not old.is_dry:
                model.get_submodule(owner).set_extra_state(extra)


def _fill_live(old: _Old, live: torch.Tensor, leaf: _Leaf, path: str) -> None:
    target = local_of(live)
    if tuple(live.shape) != _whole_shape(leaf.spec) or target.dtype != leaf.spec.dtype:
        is_, was = f"{live.dtype} {list(live.shape)}", f"{leaf.spec.dtype} {list(_whole_shape(leaf.spec))}"
        raise StateError(f"{path} is {is_}, saved was {was}")
    old.fill(target, _region_of(live), leaf)


def _fill_optimizer(
    old: _Old,
    optimizer: Optimizer,
    saved: Any,
    parameters: Mapping[str, torch.Tensor],
    names: Mapping[int, str],
    path: str,
) -> None:
    state = {
        label: {key: _cut_like(old, value, parameters.get(label)) for key, value in entry.items()}
        for label, entry in saved["state"].items()
    }
    rest = {key: _values(old, value) for key, value in saved.items() if key != "state"}
    if not old.is_dry:
        load_optimizer(optimizer, {**rest, "state": state}, names, path, is_ours=True)


def _cut_like(old: _Old, value: Any, parameter: torch.Tensor | None) -> Any:
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


def _like(old: _Old, value: Any, live: Any) -> Any:
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


def _values(old: _Old, value: Any) -> Any:
    """The value with its tensors, for what is the same on every rank."""
    if isinstance(value, _Leaf):
        held = old.value(value)
        return held.clone() if isinstance(held, torch.Tensor) else held.copy()
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
    return tuple(slice(0, size) for size in live.shape) if layout is None else region(layout)


def _within(parts: Sequence[slice], base: Region) -> tuple[slice, ...]:
    """A region of the whole, counted from the start of another one."""
    starts = [part.start for part in base]
    return tuple(slice(part.start - start, part.stop - start) for part, start in zip(parts, starts, strict=True))


def _check_fetched(tensor: torch.Tensor, spec: Spec) -> None:
    if tensor.dtype != spec.dtype or tuple(tensor.shape) != spec.shape:
        got, said = f"{tensor.dtype} {list(tensor.shape)}", f"{spec.dtype} {list(spec.shape)}"
        raise StateError(f"{dotted(spec.path)} was fetched as {got}, its skeleton says {said}")
