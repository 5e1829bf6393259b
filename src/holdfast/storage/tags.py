"""Words that keep a checkpoint for ever: one small file each beside its manifest, `<tag>.tag`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from holdfast.errors import CheckpointError, UsageError
from holdfast.storage.stores import Store

TAG = re.compile(r"[0-9a-zA-Z][0-9a-zA-Z_.+-]{0,63}\Z")
SUFFIX = ".tag"


def of(folder: str, names: Iterable[str]) -> tuple[str, ...]:
    """The tags among the files of a checkpoint."""
    files = (name[len(folder) + 1 :] for name in names)
    return tuple(sorted(file.removesuffix(SUFFIX) for file in files if file.endswith(SUFFIX) and "/" not in file))


def put(store: Store, folder: str, tag: str, now: float) -> None:
    """Tag a checkpoint. Nothing happens if it has that tag."""
    _check(tag)
    store.put_new(f"{folder}/{tag}{SUFFIX}", json.dumps({"created_unix_s": now}).encode())


def take(store: Store, folder: str, tag: str) -> None:
    """Take a tag away. CheckpointError if there is none such."""
    _check(tag)
    if tag not in of(folder, store.names(folder)):
        raise CheckpointError(f"{store.url}/{folder} is not pinned as {tag}")
    store.delete(f"{folder}/{tag}{SUFFIX}")


def _check(tag: str) -> None:
    if not TAG.match(tag):
        raise UsageError(f"{tag!r:.80} is no tag: use letters, digits and - _ . +, 64 at most")
