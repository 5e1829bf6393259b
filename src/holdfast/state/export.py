"""A checkpoint as plain safetensors: one file, or a set with an index as Hugging Face has it.

    python -m holdfast.state.export PLACE TARGET …      what `holdfast checkpoints export` runs, in a process with torch

Tensor by tensor: put together from the parts that have pieces of it, every block verified, cast if asked for, written.
At most the largest tensor is in memory, twice if it is cast. What is no tensor is left out. A tensor that stands in
several places is written once; the file's metadata names the others, as safetensors' own `save_model` does.

The result appears in one move, when it is whole.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from holdfast.errors import CheckpointError, HoldfastError, UsageError
from holdfast.state.leaves import DTYPES, Spec, dotted
from holdfast.state.plain import INDEX, SUFFIX, Plain, write_one, write_set
from holdfast.state.tree import sketch
from holdfast.storage.catalogue import Catalogue, Found
from holdfast.storage.image import Entry
from holdfast.storage.sources import PartSource
from holdfast.storage.stores import open_store

SHARD_BYTES = 5_000_000_000
"""What Hugging Face's own tools take."""
CASTS = ("bfloat16", "float16", "float32", "float64")
USAGE = 2
"""Exit code of a mistake in the arguments."""


@dataclass(slots=True)
class Whole:
    """A tensor of the state, in pieces."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: list[tuple[PartSource, Entry]] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    """Other names of the same tensor."""

    def plain(self, dtype: torch.dtype | None) -> Plain:
        """To be written, cast if it is of floating point."""
        chosen = dtype if dtype is not None and self.dtype.is_floating_point else self.dtype
        return Plain(
            name=self.name,
            dtype=chosen,
            shape=self.shape,
            make=lambda: _assembled(self).to(chosen),
            others=tuple(self.others),
        )


def export(
    catalogue: Catalogue,
    found: Found,
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
        tensors = _wholes(sources, None if model is None else _model_name(sources, model))
        plain = [whole.plain(dtype) for whole in tensors]
        if target.suffix != SUFFIX:
            return write_set(target, plain, shard_bytes)
        write_one(target, plain)
        return [target]


# --- what there is


def _wholes(sources: Mapping[int, PartSource], model: str | None) -> list[Whole]:
    found: dict[str, Whole] = {}
    for number, source in sorted(sources.items()):
        for entry in source.layout.entries:
            if model is None or entry.path[:1] == (model,):
                _add(found, number, source, entry, model)
    for whole in found.values():
        _check_complete(whole)
    return list(found.values())


def _add(found: dict[str, Whole], number: int, source: PartSource, entry: Entry, model: str | None) -> None:
    name = _name(entry.path, entry.name, model)
    shape = (torch.Size(entry.whole), DTYPES[entry.dtype])
    if name in found and (torch.Size(found[name].shape), found[name].dtype) != shape:
        name = f"{name}@{number}"  # a tensor that is another one on each rank
    whole = found.setdefault(name, Whole(name, DTYPES[entry.dtype], entry.whole))
    whole.others = [_name(path, dotted(path), model) for path in entry.aliases if model is None or path[0] == model]
    if all(known.offsets != entry.offsets or not known.size_bytes for _, known in whole.pieces):
        whole.pieces.append((source, entry))


def _name(path: Sequence[str | int], name: str, model: str | None) -> str:
    """A model's own name for it, or the whole path in dots."""
    return name if model is None else dotted(tuple(path[1:]))


def _check_complete(whole: Whole) -> None:
    have = sum(math.prod(entry.shape) for _, entry in whole.pieces)
    if have != math.prod(whole.shape):
        raise CheckpointError(f"{whole.name} has {math.prod(whole.shape)} values, the parts hold {have} of them")


def _model_name(sources: Mapping[int, PartSource], wanted: str) -> str:
    tree = sketch(sources[0].skeleton, lambda _, spec: spec)
    models = [name for name, branch in tree.items() if _is_model(name, branch)] if isinstance(tree, dict) else []
    if wanted:
        if wanted not in models:
            raise UsageError(f"there is no model {wanted} in it: {', '.join(models) or 'there is none at all'}")
        return wanted
    if len(models) != 1 and "model" not in models:
        several = f"say which with --model: {', '.join(models)}" if models else "nothing in it looks like one"
        raise UsageError(f"it has {len(models)} models; {several}")
    return "model" if "model" in models else models[0]


def _is_model(name: object, branch: object) -> bool:
    """A module's state is flat: names of parameters and buffers, no groups."""
    if not isinstance(name, str) or name.startswith("@") or not isinstance(branch, dict) or "param_groups" in branch:
        return False
    return any(isinstance(value, Spec) for value in branch.values())


def _assembled(whole: Whole) -> torch.Tensor:
    """The tensor itself, from its pieces."""
    result = torch.empty(whole.shape, dtype=whole.dtype)
    for source, entry in whole.pieces:
        if entry.size_bytes:
            content = bytearray(source.read(entry, 0, entry.size_bytes))
            piece = torch.frombuffer(content, dtype=torch.uint8).view(whole.dtype).view(entry.shape)
            zipped = zip(entry.offsets, entry.shape, strict=True)
            result[tuple(slice(start, start + size) for start, size in zipped)] = piece
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
    """Exports as the flags say; prints what it wrote."""
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
    catalogue = Catalogue(open_store(flags.place))
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
        raise UsageError(f"{word!r:.40} is no step: give a number, or latest")
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
