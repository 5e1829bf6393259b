"""What a state holds beside its tensors (learning rates, counters, names), for stock torch.

Ours reads it from the skeleton. torch.distributed.checkpoint wants each value as a torch.save archive of its own, and
finds it by `.metadata`: so the publisher writes one more small file, of these archives one after another.

    content, stored = stock_objects(skeletons)       the file, and what lies where in it
    dcp_metadata(parts, [(file, one) for one in stored])

Which values stand alone is torch's rule: dictionaries are looked into; lists where a dictionary or a tensor is inside.
A value that only NumPy could make again is left out. Of a value that several shards have, the first counts; the lists
of parameters of an optimizer's groups are joined, because a stage of a pipeline has its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from msgspec import Struct

from holdfast.errors import CheckpointError
from holdfast.storage.archive_frames import archive
from holdfast.storage.header import Path
from holdfast.storage.pickles import Call, Global, pickled

TENSORS = ("T", "D", "N", "A")
BRANCHES = ("d", "c")
ROWS = ("l", "t", "z")
DEPTH_MAX = 100


class StoredObject(Struct, frozen=True, kw_only=True):
    """A value that is not a tensor, in a file of such values."""

    name: str
    path: Path
    start: int
    size_bytes: int


class _Unknown(Exception):
    """A value that is left out."""


def stock_objects(skeletons: Iterable[bytes]) -> tuple[bytes, tuple[StoredObject, ...]]:
    """Return the archives of all values of a state that are not tensors, and where each lies. `skeletons`: of the
    state's shards."""
    found: dict[str, tuple[Path, Any]] = {}
    for skeleton in skeletons:
        for path, value in _values(_root(skeleton), ()):
            name = ".".join(map(str, path))
            if name not in found:
                found[name] = path, value
            elif path[-3:-2] == ("param_groups",) and path[-1] == "params" and path == found[name][0]:
                found[name] = path, _joined(found[name][1], value)
            # else it is the same, or keys contain dots: the first has the name
    content, stored = bytearray(), list[StoredObject]()
    for name, (path, value) in found.items():
        packed = archive(pickled(value))
        stored.append(StoredObject(name=name, path=path, start=len(content), size_bytes=len(packed)))
        content += packed
    return bytes(content), tuple(stored)


def _joined(one: Any, other: Any) -> Any:
    if not isinstance(one, list) or not isinstance(other, list) or one == other:
        return one
    known = {label for label in one if isinstance(label, str)}
    return [*one, *(label for label in other if isinstance(label, str) and label not in known)]


def _root(skeleton: bytes) -> Any:
    try:
        _, node = msgspec.msgpack.decode(skeleton, type=tuple[int, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise CheckpointError(f"the skeleton cannot be read: {error!r:.200}") from None
    return node


def _values(node: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    tag = _tag(node)
    if len(path) > DEPTH_MAX or tag in TENSORS:
        return
    if tag in BRANCHES:
        for key, item in zip(node[1::2], node[2::2], strict=False):
            yield from _values(item, (*path, key))
    elif tag in ROWS and any(_is_looked_into(item, 0) for item in node[1:]):
        for index, item in enumerate(node[1:]):
            yield from _values(item, (*path, index))
    else:
        try:
            yield path, _plain(node, 0)
        except _Unknown:
            return


def _is_looked_into(node: Any, depth: int) -> bool:
    tag = _tag(node)
    inside = tag in ROWS and depth < DEPTH_MAX and any(_is_looked_into(item, depth + 1) for item in node[1:])
    return tag in BRANCHES or tag in TENSORS or inside


def _plain(node: Any, depth: int) -> Any:
    if depth > DEPTH_MAX:
        raise _Unknown
    match node:
        case None | bool() | int() | float() | str() | bytes():
            return node
        case ["l", *items]:
            return [_plain(item, depth + 1) for item in items]
        case ["t" | "z", *items]:
            return tuple(_plain(item, depth + 1) for item in items)
        case ["i", str(digits)] if digits.removeprefix("-").isdigit() and len(digits) < 600:
            return int(digits)
        case ["j", float(real), float(imaginary)]:
            return Call(Global("builtins", "complex"), (real, imaginary))
        case ["y", str(name)] if name.isidentifier():
            return Global("torch", name)
        case ["v", str(name)]:
            return Call(Global("torch", "device"), (name,))
    raise _Unknown


def _tag(node: Any) -> str | None:
    return node[0] if isinstance(node, list) and node and isinstance(node[0], str) else None
