"""Keeps torch from looking up host names of connections while a job recovers.

Each TCPStore client asks the resolver for its peer's name, for log lines only. One lost packet of a busy name server is
a pause of five seconds, in the middle of a recovery. After a look-up that failed, though, a process never asks again;
and what a fork server has learned its forks know. So it is made to fail here, once, at once: a connection to a store in
a child, with a resolver that has no name servers (glibc keeps its state in a struct whose fifth word counts them).
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

_NAME_SERVERS_OFFSET = 16
"""Behind retrans, retry (int each) and options (unsigned long)."""
_CONNECT_TIMEOUT = timedelta(seconds=5)


def stop_looking_up() -> None:
    """Stop reverse look-ups for this process and its forks. Without glibc nothing happens, and look-ups stay."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "__res_state"):
        return
    from torch.distributed import TCPStore

    with _store_in_a_child() as port, _without_name_servers(libc):
        TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=_CONNECT_TIMEOUT)


@contextmanager
def _without_name_servers(libc: ctypes.CDLL) -> Iterator[None]:
    """Run without name servers, for this thread."""
    state = libc["__res_state"]
    state.restype = ctypes.c_void_p
    libc["__res_init"]()
    count = ctypes.c_int.from_address(state() + _NAME_SERVERS_OFFSET)
    before, count.value = count.value, 0
    try:
        yield
    finally:
        count.value = before


@contextmanager
def _store_in_a_child() -> Iterator[int]:
    """Its port. A server has threads, which must not be here."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _serve(writing)
    os.close(writing)
    try:
        yield int(os.read(reading, 16) or b"0")
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _serve(writing: int) -> None:
    try:
        from torch.distributed import TCPStore

        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writing, str(store.port).encode())
        signal.pause()
    finally:
        os._exit(1)
