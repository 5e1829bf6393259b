"""The state of S old shards into the live objects of a world of any size and layout: DDP, FSDP2, HSDP, TP, pipelines.

The old shards are known by their skeletons; their tensors stay where they are (a peer, a file, memory) until they are
moved. Tensors are found by name, never by position. Each old shard has a region of the full tensor, and so does this
rank; torch's own planner finds where they intersect. Only the intersections are copied. So no full tensor is ever in
memory, unless this rank has the full tensor.

    modules       filled where they are
    optimizers    the state is sharded as the parameter is: a value of the parameter's shape is sharded, any other
                  (Adam's `step`) is the same on every rank
    others        as the first shard has them; they are the same on every rank
    gradients     of an accumulation: sharded as their parameter is

Shards need not have the same names: a stage of a pipeline has its own (union_tree.py). A stage that is filled takes the
names that it has. Parameters that are plain tensors of one name on several shards must have the same content
(plain_copies.py).

Shards that hold the same region (HSDP's replicas) stand in for one another: `shards` need not have all of them.

It is done in two passes, so that all copies can be made at once in between (load_parts.py): first memory is allocated
and the copies are requested, in an order that is the same every time; then the filled tensors are given to the objects.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn import Module

from holdfast.errors import StateError
from holdfast.state.dtensors import Sharded, TensorSharding, layout_of, local_of, local_region
from holdfast.state.modules import EXTRA, check_names, load_transient, transient_state, unwrapped
from holdfast.state.optimizers import group_labels, load_optimizer
from holdfast.state.per_rank_state import LOCAL
from holdfast.state.plain_copies import refusal
from holdfast.state.tracked import FLAGS, GRADIENTS, TRANSIENT, Tracked
from holdfast.state.tree import Path, TensorSpec, dotted, leaf_value, sketch
from holdfast.state.union_tree import fitted_groups, union_of
from holdfast.storage.coverage import Box, Coverage

Fetch = Callable[[int, int], torch.Tensor]
"""(shard, number of the tensor in it) → the tensor."""
Region = tuple[slice, ...]
Finish = Callable[[], Any]
"""An action for the end, when everything was copied."""


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A tensor of a shard, in its tree."""

    spec: TensorSpec


@dataclass(frozen=True, slots=True)
class PlainCopy:
    """A tensor that is no DTensor, in one of the shards that have it."""

    shard: int
    index: int
    spec: TensorSpec


@dataclass(frozen=True, slots=True)
class SavedRegion:
    """A tensor of one shard, or some rows of it, and its place in the full tensor."""

    shard: int
    index: int
    spec: TensorSpec
    local_region: Region
    rows: slice
    """The rows of the shard's tensor."""
    origin: Any = None
    """Where to get it from, for the subclass that copies it."""

    @property
    def size_bytes(self) -> int:
        return _volume(self.local_region) * self.spec.dtype.itemsize


class SavedLayout:
    """The old shards: which part has which region of which tensor. Subclasses say how it is moved."""

    is_dry = False
    """Whether nothing is loaded: it is only found out what would be moved."""

    def __init__(self, shards: Mapping[int, bytes]) -> None:
        if not shards:
            raise StateError("there is no shard to reshard from")
        self._saved_regions: dict[Path, dict[tuple[tuple[int, int], ...], list[SavedRegion]]] = {}
        self._copies: dict[Path, list[PlainCopy]] = {}
        self.trees = [sketch(shards[shard], partial(self._record, shard)) for shard in sorted(shards)]

    def regions_of_tensor(self, shard: int, index: int, spec: TensorSpec, region: Region) -> list[SavedRegion]:
        """Return the regions that a shard's tensor consists of."""
        return [SavedRegion(shard, index, spec, region, slice(0, spec.shape[0] if spec.shape else 1))]

    def transfer(self, saved_region: SavedRegion, inside: Region, target: torch.Tensor) -> None:
        """Copy what lies inside of a saved region into the target: now, or before the second pass."""
        raise NotImplementedError

    def have_same_content(self, one: PlainCopy, other: PlainCopy) -> bool:
        """Return whether two shards have the same tensor, to the bit."""
        raise NotImplementedError

    def check_copies(self, leaf: _Leaf) -> None:
        """Raise StateError for a plain parameter that shards have with other content: it is no one tensor."""
        first, *others = self._copies.get(leaf.spec.path, [None])
        for other in others:
            assert first is not None and other is not None
            is_alike = (first.spec.shape, first.spec.dtype) == (other.spec.shape, other.spec.dtype)
            if not is_alike or not self.have_same_content(first, other):
                raise refusal(leaf.spec.path, first.shard, other.shard)

    def _record(self, shard: int, index: int, spec: TensorSpec) -> _Leaf:
        region = _everything(spec.shape) if spec.layout is None else local_region(spec.layout)
        if tuple(part.stop - part.start for part in region) != spec.shape:
            raise StateError(f"{dotted(spec.path)} of shard {shard} has not the shape that its place in the mesh gives")
        known, key = self._saved_regions.setdefault(spec.path, {}), _key(region)
        if key not in known:
            known[key] = self.regions_of_tensor(shard, index, spec, region)
        if spec.layout is None:
            self._copies.setdefault(spec.path, []).append(PlainCopy(shard, index, spec))
        return _Leaf(spec)

    def value(self, leaf: _Leaf) -> Any:
        """Return the value of a leaf that is the same on every rank."""
        if leaf.spec.layout is not None:
            raise StateError(
                f"{dotted(leaf.spec.path)} is a shard, where only values that are the same on every rank can be stored"
            )
        made = torch.empty(leaf.spec.shape, dtype=leaf.spec.dtype, device="cpu")
        for saved_region in self._saved_regions[leaf.spec.path][_key(_everything(leaf.spec.shape))]:
            inside = tuple(slice(0, part.stop - part.start) for part in saved_region.local_region)
            self.transfer(saved_region, inside, made[saved_region.rows] if made.dim() else made)
        return leaf_value(leaf.spec, made)

    def fill(self, target: torch.Tensor, wanted: Region, leaf: _Leaf) -> None:
        """Copy the wanted region of the full tensor into `target`, region by region."""
        saved_regions = list(chain.from_iterable(self._saved_regions[leaf.spec.path].values()))
        for saved_region, inside, within in _intersections(self._cover(saved_regions, wanted, leaf), wanted, leaf.spec):
            self.transfer(saved_region, inside, target[within])

    def _cover(
        self, saved_regions: Sequence[SavedRegion], wanted: Region, leaf: _Leaf
    ) -> list[tuple[SavedRegion, Region]]:
        """Return what is used of each region, without overlap: all must belong to the same full tensor, and together
        cover what is wanted of it."""
        shape, coverage = _full_shape(leaf.spec), Coverage(_full_shape(leaf.spec))
        covered: list[tuple[SavedRegion, Region]] = []
        for saved_region in saved_regions:
            if _full_shape(saved_region.spec) != shape or saved_region.spec.dtype != leaf.spec.dtype:
                raise StateError(f"{dotted(leaf.spec.path)} is not the same tensor in every shard")
            region = saved_region.local_region
            boxes = coverage.add([part.start for part in region], [part.stop - part.start for part in region])
            covered += [(saved_region, tuple(slice(start, stop) for start, stop in box)) for box in boxes]
        if any(_meets(box, wanted) for box in coverage.missing):
            missing = coverage.describe_missing()
            raise StateError(f"{dotted(leaf.spec.path)} is not complete: no available shard has {missing}")
        return covered


def _key(region: Region) -> tuple[tuple[int, int], ...]:
    return tuple((part.start, part.stop) for part in region)


def _meets(box: Box, region: Region) -> bool:
    pairs = zip(box, region, strict=True)
    return all(max(start, part.start) < min(stop, part.stop) for (start, stop), part in pairs)


def _intersections(
    covered: Sequence[tuple[SavedRegion, Region]], wanted: Region, spec: TensorSpec
) -> Iterator[tuple[SavedRegion, Region, Region]]:
    """Return the regions that meet the wanted one, in their order: what of the region, and where in the wanted one."""
    # Imported when needed: it costs a tenth of a second, and most workers never reshard.
    from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    if not _volume(wanted):
        return
    saved = TensorStorageMetadata(
        TensorProperties(spec.dtype), torch.Size(_full_shape(spec)), [_chunk(region) for _, region in covered]
    )
    items = create_read_items_for_chunk_list(dotted(spec.path), saved, [_chunk(wanted)])
    for number, item in sorted(((item.storage_index.index or 0, item) for item in items), key=lambda pair: pair[0]):
        saved_region, region = covered[number]
        begins = [part.start - full.start for part, full in zip(region, saved_region.local_region, strict=True)]
        starts = [at + offset for at, offset in zip(begins, item.storage_offsets, strict=True)]
        yield saved_region, _slices(starts, item.lengths), _slices(item.dest_offsets, item.lengths)


def _chunk(region: Region) -> Any:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    starts, sizes = [part.start for part in region], [part.stop - part.start for part in region]
    return ChunkStorageMetadata(torch.Size(starts), torch.Size(sizes))


def _slices(starts: Sequence[int], sizes: Sequence[int]) -> Region:
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


class _Fetched(SavedLayout):
    """Old shards whose tensors are fetched completely, one after another."""

    def __init__(self, shards: Mapping[int, bytes], fetch: Fetch) -> None:
        super().__init__(shards)
        self._fetch = fetch

    def transfer(self, saved_region: SavedRegion, inside: Region, target: torch.Tensor) -> None:
        source = self._fetch(saved_region.shard, saved_region.index)
        _check_fetched(source, saved_region.spec)
        with torch.no_grad():
            target.copy_(source[inside])

    def have_same_content(self, one: PlainCopy, other: PlainCopy) -> bool:
        contents = []
        for copy in (one, other):
            contents.append(self._fetch(copy.shard, copy.index).cpu())
            _check_fetched(contents[-1], copy.spec)
        first, second = (content.contiguous().view(-1).view(torch.uint8) for content in contents)
        return torch.equal(first, second)


class _DryRun(SavedLayout):
    """Old shards of which nothing is moved, only recorded."""

    is_dry = True

    def __init__(self, shards: Mapping[int, bytes]) -> None:
        super().__init__(shards)
        self.requests: list[tuple[int, int]] = []

    def transfer(self, saved_region: SavedRegion, inside: Region, target: torch.Tensor) -> None:
        self.requests.append((saved_region.shard, saved_region.index))

    def have_same_content(self, one: PlainCopy, other: PlainCopy) -> bool:
        self.requests += [(one.shard, one.index), (other.shard, other.index)]
        return True


def reshard(shards: Mapping[int, bytes] | Sequence[bytes], fetch: Fetch, tracked: Tracked) -> None:
    """Load the state of old shards, given by their skeletons, into objects that may be sharded otherwise, or not at
    all."""
    for finish in request_loads(_Fetched(_numbered(shards), fetch), tracked):
        finish()


def needed(shards: Mapping[int, bytes] | Sequence[bytes], tracked: Tracked) -> list[tuple[int, int]]:
    """Return what `reshard` would fetch for the same objects, (shard, number of the tensor), in that order."""
    old = _DryRun(_numbered(shards))
    request_loads(old, tracked)
    return old.requests


def request_loads(old: SavedLayout, tracked: Tracked) -> list[Finish]:
    """Run the first pass, which records requests; the second is to call what is returned, in order."""
    if tracked.local_names() or any(LOCAL in tree for tree in old.trees if isinstance(tree, dict)):
        raise StateError(
            f"each rank has state of its own ({', '.join(tracked.local_names()) or 'gradients in accumulation'}), which"
            " cannot be divided again: start with as many workers, and the model sharded in the same way"
        )
    tree = union_of(old.trees, tracked.modules(), tracked.optimizers())
    tracked.check_names(tree)
    finish: list[Finish] = []
    left_out = tree.get(TRANSIENT, {})
    for name, module in tracked.modules().items():
        finish += _fill_module(old, module, tree[name], name, tracked.is_part)
        own = transient_state(module)
        there = {full: value for full, value in left_out.get(name, {}).items() if full in own}
        finish.append(partial(load_transient, module, _values(old, there)))
    for name, thing in tracked.others().items():
        live = thing.state_dict() if _has_shards(tree[name]) else None
        finish.append(partial(thing.load_state_dict, _like(old, tree[name], live)))
    tree |= _fitted_optimizers(tree, tracked)
    tracked.align_groups(tree)
    names = tracked.parameter_names()
    parameters = {names[id(item)]: item for item in tracked.parameters() if id(item) in names}
    for name, optimizer in tracked.optimizers().items():
        made = _optimizer_state(old, tree[name], parameters)
        if not old.is_dry:  # else all the unused tensors would stay in memory
            finish.append(partial(load_optimizer, optimizer, made, names, name, is_ours=True))
    finish.append(partial(tracked.flags.load, tracked.flags.known_of(tree.get(FLAGS, {}))))
    finish.append(partial(tracked.load_gradients, _gradients(old, tree, tracked)))
    return finish


def _fitted_optimizers(tree: dict[str, Any], tracked: Tracked) -> dict[str, Any]:
    """Return what was saved of the optimizers, in the groups that they have now."""
    names, known = tracked.parameter_names(), tracked.known_names()
    fitted = {}
    for name, optimizer in tracked.optimizers().items():
        live = group_labels(optimizer, names)
        fitted[name] = tree[name] if live is None else fitted_groups(tree[name], live, known, tracked.is_part, name)
    return fitted


def _numbered(shards: Mapping[int, bytes] | Sequence[bytes]) -> Mapping[int, bytes]:
    return shards if isinstance(shards, Mapping) else dict(enumerate(shards))


def _fill_module(old: SavedLayout, module: Module, saved: Any, path: str, is_part: bool) -> list[Finish]:
    finish: list[Finish] = []
    model = unwrapped(module)
    live = model.state_dict()
    check_names(set(live), set(live) & set(saved) if is_part else set(saved), path)
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, value in live.items():
        leaf = saved[name]
        if isinstance(value, torch.Tensor) and isinstance(leaf, _Leaf):
            if name in parameters:
                old.check_copies(leaf)
            _fill_live(old, value, leaf, f"{path}.{name}")
        elif name.endswith(EXTRA):
            owner = name.removesuffix(EXTRA).removesuffix(".")
            finish.append(partial(model.get_submodule(owner).set_extra_state, _values(old, leaf)))
        else:
            finish.append(partial(_give_back, model, name, _values(old, leaf)))
    return finish


def _give_back(model: Module, name: str, value: Any) -> None:
    """Return a value that a hook has put into the state to the hook that accepts it, if there is one."""
    model.load_state_dict({**model.state_dict(), name: value}, strict=False)


def _fill_live(old: SavedLayout, live: torch.Tensor, leaf: _Leaf, path: str) -> None:
    target = local_of(live)
    if tuple(live.shape) != _full_shape(leaf.spec) or target.dtype != leaf.spec.dtype:
        is_, was = f"{live.dtype} {list(live.shape)}", f"{leaf.spec.dtype} {list(_full_shape(leaf.spec))}"
        raise StateError(f"{path} is {is_}, saved was {was}")
    old.fill(target, _region_of(live), leaf)


def _optimizer_state(old: SavedLayout, saved: Any, parameters: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    state = {
        label: {key: _sharded_like(old, value, parameters.get(label)) for key, value in entry.items()}
        for label, entry in saved["state"].items()
    }
    rest = {key: _values(old, value) for key, value in saved.items() if key != "state"}
    return {**rest, "state": state}


def _gradients(old: SavedLayout, tree: dict[str, Any], tracked: Tracked) -> dict[str, Any] | None:
    if (saved := tree.get(GRADIENTS)) is None:
        return None
    parameters = dict(enumerate(tracked.parameters()))
    return {label: _sharded_like(old, value, parameters.get(int(label))) for label, value in saved.items()}


def _sharded_like(old: SavedLayout, value: Any, parameter: torch.Tensor | None) -> Any:
    """Return one value of a parameter's state, sharded as the parameter is if it has its shape."""
    if not isinstance(value, _Leaf):
        return _values(old, value)
    shape = _full_shape(value.spec)
    if parameter is None or tuple(parameter.shape) == shape:
        old.check_copies(value)
    is_sharded = isinstance(parameter, DTensor) or value.spec.layout is not None
    if parameter is None or tuple(parameter.shape) != shape or not is_sharded:
        if value.spec.layout is not None:
            raise StateError(f"{dotted(value.spec.path)} is a shard that does not have its parameter's shape")
        return _values(old, value)
    like = local_of(parameter)
    local = torch.empty(like.shape, dtype=value.spec.dtype, device=like.device)
    old.fill(local, _region_of(parameter), value)
    return Sharded(local, layout_of(parameter)) if isinstance(parameter, DTensor) else local


def _like(old: SavedLayout, value: Any, live: Any) -> Any:
    """Return a value for an object's own load_state_dict; sharded ones are sharded as the object has them now."""
    if isinstance(value, _Leaf) and isinstance(live, DTensor):
        made = torch.empty_like(live)
        _fill_live(old, made, value, dotted(value.spec.path))
        return made
    if isinstance(value, _Leaf) and value.spec.layout is not None:
        full = torch.empty(value.spec.layout.shape, dtype=value.spec.dtype, device="cpu")
        old.fill(full, _region_of(full), value)
        return full
    if type(value) is dict:
        known = live if isinstance(live, dict) else {}
        return {key: _like(old, item, known.get(key)) for key, item in value.items()}
    if type(value) in (list, tuple):
        beside = live if isinstance(live, list | tuple) and len(live) == len(value) else [None] * len(value)
        return type(value)(_like(old, item, other) for item, other in zip(value, beside, strict=True))
    return _values(old, value)


def _values(old: SavedLayout, value: Any) -> Any:
    """Return the value with its tensors, for what is the same on every rank."""
    if isinstance(value, _Leaf):
        return old.value(value)
    if type(value) is dict:
        return {key: _values(old, item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_values(old, item) for item in value)
    return value


def _has_shards(value: Any) -> bool:
    items = value.values() if type(value) is dict else value if type(value) in (list, tuple) else ()
    is_sharded = isinstance(value, _Leaf) and value.spec.layout is not None
    return is_sharded or any(_has_shards(item) for item in items)


def _full_shape(spec: TensorSpec) -> tuple[int, ...]:
    return spec.shape if spec.layout is None else spec.layout.shape


def _region_of(live: torch.Tensor) -> Region:
    layout: TensorSharding | None = layout_of(live) if isinstance(live, DTensor) else None
    return _everything(live.shape) if layout is None else local_region(layout)


def _everything(shape: Sequence[int]) -> Region:
    return tuple(slice(0, size) for size in shape)


def _volume(region: Region) -> int:
    return math.prod(part.stop - part.start for part in region)


def _check_fetched(tensor: torch.Tensor, spec: TensorSpec) -> None:
    if tensor.dtype != spec.dtype or tuple(tensor.shape) != spec.shape:
        got, expected = f"{tensor.dtype} {list(tensor.shape)}", f"{spec.dtype} {list(spec.shape)}"
        raise StateError(f"{dotted(spec.path)} was fetched as {got}, its skeleton says {expected}")
