"""A checkpoint as plain safetensors: one file, or a set with an index as Hugging Face has it.

    python -m holdfast.state.export PLACE TARGET …      what `holdfast checkpoints export` runs, in a process with torch

Tensor by tensor: assembled from the parts that have regions of it, every block verified, cast if asked for, written.
At most the largest tensor is in memory, twice if it is cast. What is no tensor is left out. A tensor that stands in
several places is written once; the file's metadata names the others, as safetensors' own `save_model` does.

The result appears in one move, when it is full.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from holdfast.errors import CheckpointError, HoldfastError, UsageError
from holdfast.state.plain_copies import StoredRows, have_same_bytes
from holdfast.state.safetensors_files import INDEX, SUFFIX, SafetensorsFile, write_one, write_set
from holdfast.state.tensor_specs import DTYPES, TensorSpec, dotted
from holdfast.state.tensor_specs import Path as TreePath
from holdfast.state.tree import sketch, specs
from holdfast.state.union_tree import is_of_groups
from holdfast.storage.checkpoint_catalogue import CheckpointCatalogue, FoundCheckpoint
from holdfast.storage.coverage import Box, Coverage
from holdfast.storage.image import TensorEntry
from holdfast.storage.part_readers import PartSource
from holdfast.storage.stores import open_store

SHARD_BYTES = 5_000_000_000
"""The default of Hugging Face's own tools."""
CASTS = ("bfloat16", "float16", "float32", "float64")
USAGE = 2
"""Exit code of a mistake in the arguments."""


@dataclass(slots=True)
class FullTensor:
    """A full tensor of the state, given by its regions."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    coverage: Coverage
    regions: list[tuple[PartSource, TensorEntry, list[Box]]] = field(default_factory=list)
    """The parts that have it, and what is used of each: what no earlier part has."""
    others: list[str] = field(default_factory=list)
    """Other names of the same tensor."""

    def plain(self, dtype: torch.dtype | None) -> SafetensorsFile:
        """Return the tensor to write, cast if it is of floating point."""
        chosen = dtype if dtype is not None and self.dtype.is_floating_point else self.dtype
        return SafetensorsFile(
            name=self.name,
            dtype=chosen,
            shape=self.shape,
            make=lambda: _assembled(self).to(chosen),
            others=tuple(self.others),
        )


def export(
    catalogue: CheckpointCatalogue,
    found: FoundCheckpoint,
    target: Path,
    model: str | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    is_forced: bool = False,
) -> list[Path]:
    """Write a checkpoint's tensors; the files. `model`: that tracked model's alone, by its own names; "" for the only
    one there is. A target that ends in .safetensors is one file, any other a directory."""
    _check_target(target, is_forced)
    with catalogue.sources(found) as sources:
        shards = found.about.shards
        tensors = _full_tensors(sources, shards, None if model is None else _model_name(sources, shards, model))
        plain = [full.plain(dtype) for full in tensors]
        if target.suffix != SUFFIX:
            return write_set(target, plain, shard_bytes)
        write_one(target, plain)
        return [target]


# --- what there is


def _full_tensors(sources: Mapping[int, PartSource], shards: int, model: str | None) -> list[FullTensor]:
    """Put together shard by shard: what several shards have alike is then taken from one of them, not a mixture."""
    found: dict[str, FullTensor] = {}
    other_content = _other_content(sources, shards, model)
    for number in sorted(sources, key=lambda number: (number % shards, number)):
        for entry in sources[number].layout.entries:
            if model is None or entry.path[:1] == (model,):
                is_other = (entry.path, number % shards) in other_content
                _add(found, number % shards, sources[number], entry, model, is_other)
    for full in found.values():
        _check_complete(full)
    return list(found.values())


def _other_content(sources: Mapping[int, PartSource], shards: int, model: str | None) -> set[tuple[TreePath, int]]:
    """Return the plain parameters, and their state, that a shard has with other content than the first that has them:
    experts, layers that are cut by hand. Buffers are left out, of which each rank may have its own statistics."""
    if shards == 1:
        return set()
    copies: dict[TreePath, dict[int, list[StoredRows]]] = {}
    trained: set[str] = set()
    for shard in range(shards):
        trained.update(_trained(sketch(sources[shard].skeleton, lambda _, spec: spec)))
        plain = {spec.path: spec.shape for spec in specs(sources[shard].skeleton) if spec.layout is None}
        for number in range(shard, len(sources), shards):
            for entry in sources[number].layout.entries:
                if plain.get(entry.path) == entry.full_shape and (model is None or entry.path[0] == model):
                    rows = StoredRows(sources[number], entry)
                    copies.setdefault(entry.path, {}).setdefault(shard, []).append(rows)
    found: set[tuple[TreePath, int]] = set()
    for path, by_shard in copies.items():
        if len(by_shard) > 1 and (not trained or _is_trained(path, trained)):
            first, *others = (sorted(rows, key=lambda one: one.entry.offsets) for rows in by_shard.values())
            pairs = zip(list(by_shard)[1:], others, strict=True)
            found |= {(path, shard) for shard, rows in pairs if not have_same_bytes(first, rows)}
    return found


def _trained(tree: Any) -> Iterator[str]:
    """Return the names that parameters have in the groups of optimizers."""
    for branch in tree.values() if isinstance(tree, dict) else ():
        if is_of_groups(branch):
            yield from (str(label) for group in branch["param_groups"] for label in group["params"])


def _is_trained(path: TreePath, trained: set[str]) -> bool:
    """Return whether a path is that of a parameter, or of its state in an optimizer."""
    is_state = path[1:2] == ("state",) and len(path) > 2 and str(path[2]) in trained
    return is_state or dotted(path) in trained or dotted(path[1:]) in trained


def _add(
    found: dict[str, FullTensor],
    shard: int,
    source: PartSource,
    entry: TensorEntry,
    model: str | None,
    is_other: bool,
) -> None:
    name = _name(entry.path, entry.name, model)
    shape = (torch.Size(entry.full_shape), DTYPES[entry.dtype])
    if is_other or (name in found and (torch.Size(found[name].shape), found[name].dtype) != shape):
        name = f"{name}@{shard}"  # a tensor that is another one on each shard
    full = found.setdefault(name, FullTensor(name, DTYPES[entry.dtype], entry.full_shape, Coverage(entry.full_shape)))
    full.others = [_name(path, dotted(path), model) for path in entry.aliases if model is None or path[0] == model]
    if boxes := full.coverage.add(entry.offsets, entry.shape):
        full.regions.append((source, entry, boxes))


def _name(path: Sequence[str | int], name: str, model: str | None) -> str:
    """Return a model's own name for a tensor, or its full path in dots."""
    return name if model is None else dotted(tuple(path[1:]))


def _check_complete(full: FullTensor) -> None:
    if full.coverage.missing:
        missing = full.coverage.describe_missing()
        raise CheckpointError(
            f"{full.name} is not complete: no part of the checkpoint has {missing}; export another step"
        )


def _model_name(sources: Mapping[int, PartSource], shards: int, wanted: str) -> str:
    trees = [sketch(sources[shard].skeleton, lambda _, spec: spec) for shard in range(shards)]
    branches = [item for tree in trees if isinstance(tree, dict) for item in tree.items()]
    models = list(dict.fromkeys(name for name, branch in branches if _is_model(name, branch)))
    if wanted:
        if wanted not in models:
            raise UsageError(f"there is no model {wanted} in it: {', '.join(models) or 'there is none at all'}")
        return wanted
    if len(models) != 1 and "model" not in models:
        several = f"say which with --model: {', '.join(models)}" if models else "nothing in it looks like one"
        raise UsageError(f"it has {len(models)} models; {several}")
    return "model" if "model" in models else models[0]


def _is_model(name: object, branch: object) -> bool:
    """Return whether a branch is a module's state, which is flat: names of parameters and buffers, no groups."""
    if not isinstance(name, str) or name.startswith("@") or not isinstance(branch, dict) or "param_groups" in branch:
        return False
    return any(isinstance(value, TensorSpec) for value in branch.values())


def _assembled(full: FullTensor) -> torch.Tensor:
    """Return the tensor itself, assembled from its regions."""
    result = torch.empty(full.shape, dtype=full.dtype, device="cpu")
    for source, entry, boxes in full.regions:
        content = bytearray(source.read(entry, 0, entry.size_bytes))
        region = torch.frombuffer(content, dtype=torch.uint8).view(full.dtype).view(entry.shape)
        for box in boxes:
            inside = tuple(slice(start - at, stop - at) for (start, stop), at in zip(box, entry.offsets, strict=True))
            result[tuple(slice(start, stop) for start, stop in box)] = region[inside]
    return result


def _check_target(target: Path, is_forced: bool) -> None:
    if not target.exists():
        return
    if not is_forced:
        raise UsageError(f"{target} is there already: name another, or use --force")
    is_file = target.suffix == SUFFIX
    if target.is_dir() == is_file:
        raise UsageError(f"{target} is {'a directory' if is_file else 'a file'}, which is not what would be written")
    if not is_file and any(not path.name.endswith((SUFFIX, INDEX)) for path in target.iterdir()):
        raise UsageError(f"{target} has other things in it than an export: it is not replaced")


# --- the process


def main(arguments: Sequence[str]) -> int:
    """Export as the flags say; print what was written."""
    flags = _parse(arguments)
    try:
        for line in _run(flags):
            print(line)  # noqa: T201
    except HoldfastError as error:
        print(f"holdfast: {error}", file=sys.stderr)  # noqa: T201
        return USAGE if isinstance(error, UsageError) else 1
    return 0


def _run(flags: argparse.Namespace) -> Iterator[str]:
    if flags.dtype and flags.dtype not in CASTS:
        raise UsageError(f"--dtype {flags.dtype}: {', '.join(CASTS)} can be cast to")
    if flags.shard_bytes < 1:
        raise UsageError("--shard-bytes must be above 0")
    catalogue = CheckpointCatalogue(open_store(flags.place))
    found = catalogue.latest() if flags.step == "latest" else catalogue.open(_step(flags.step))
    if found is None:
        raise CheckpointError(f"{catalogue.store.url} has no checkpoint that could be used")
    dtype = DTYPES[flags.dtype] if flags.dtype else None
    model = flags.model if flags.model_only else None
    files = export(catalogue, found, Path(flags.target), model, dtype, flags.shard_bytes, flags.force)
    size = sum(path.stat().st_size for path in files)
    yield f"step {found.step}: {size} bytes in {len(files)} {'file' if len(files) == 1 else 'files'}, {flags.target}"


def _step(word: str) -> int:
    if not (word.isascii() and word.isdigit()):
        raise UsageError(f"{word!r:.40} is not a step: give a number, or latest")
    return int(word)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m holdfast.state.export")
    parser.add_argument("place")
    parser.add_argument("target")
    parser.add_argument("--step", default="latest")
    parser.add_argument("--model-only", action="store_true")
    parser.add_argument("--model", default="")
    parser.add_argument("--dtype", default="")
    parser.add_argument("--shard-bytes", type=int, default=SHARD_BYTES)
    parser.add_argument("--force", action="store_true")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
