"""What every store promises."""

from __future__ import annotations

import secrets
from threading import Barrier, Thread

import pytest

from holdfast.errors import MissingError
from holdfast.storage.stores import Store
from holdfast.util.blocks import BLOCK_BYTES


def check_store(store: Store) -> None:
    _check_large_files(store)
    _check_small_files(store)
    _check_names(store)


def _check_large_files(store: Store) -> None:
    content = secrets.token_bytes(2 * BLOCK_BYTES + 12_288)
    view = memoryview(content)
    pieces = [view[start : start + BLOCK_BYTES] for start in range(0, len(content), BLOCK_BYTES)]
    told: list[tuple[int, int]] = []
    store.put("a/large", pieces, len(content), lambda done, total: told.append((done, total)))
    assert store.size("a/large") == len(content)
    assert store.read("a/large") == content
    assert store.read("a/large", 5, 10) == content[5:15]
    assert store.read("a/large", len(content) - 5, 10) == content[-5:]
    assert store.read("a/large", len(content) + 5, 10) == b""
    assert store.read("a/large", BLOCK_BYTES) == content[BLOCK_BYTES:]
    assert told[-1] == (len(content), len(content))
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    store.put("a/large", [view[:4096]], 4096)
    assert store.read("a/large") == content[:4096]
    store.put("a/empty", [], 0)
    assert store.read("a/empty") == b""


def _check_small_files(store: Store) -> None:
    assert store.put_new("a/small", b"one")
    assert not store.put_new("a/small", b"two")
    assert store.read("a/small") == b"one"
    assert not store.replace("a/small", b"three", b"two")
    assert store.replace("a/small", b"three", b"one")
    assert store.read("a/small") == b"three"
    winners: list[int] = []
    start = Barrier(6)

    def race(number: int) -> None:
        start.wait()
        if store.put_new("a/raced", b"%d" % number):
            winners.append(number)

    threads = [Thread(target=race, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(winners) == 1
    assert store.read("a/raced") == b"%d" % winners[0]


def _check_names(store: Store) -> None:
    store.put("b/c/d", [memoryview(b"12345")], 5)
    assert store.folders() == ["a", "b"]
    assert store.folders("b") == ["c"]
    assert store.folders("nothing") == []
    assert store.names("b") == {"b/c/d": 5}
    assert store.names("nothing") == {}
    assert set(store.names("")) == {"a/large", "a/empty", "a/small", "a/raced", "b/c/d"}
    assert store.modified_unix_s("b") > 1e9
    store.delete("b/c/d")
    store.delete("b/c/d")
    assert store.names("b") == {}
    with pytest.raises(MissingError):
        store.size("b/c/d")
    with pytest.raises(MissingError):
        store.read("b/c/d")
