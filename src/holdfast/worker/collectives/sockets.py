"""Finds the sockets of a communicator's mesh among all of the process, and ends them.

The only way to free a thread that hangs inside gloo is to shut the connections it waits for, and gloo does not say
which they are. This file's rule: **no other socket is touched**. A socket belongs to a mesh if

- it is remembered, by descriptor and inode, from the moment the mesh was complete, or
- while the mesh is still being made: it is TCP, and its own address is the mesh's listener (it was accepted there), or
  its peer's address is the listener of another member (it was connected there). Listeners live for one view.

A descriptor may be closed and used again by another thread at any moment. So it is duplicated first, and everything is
asked of the duplicate, which no other code can close.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

Address = tuple[str, int]
# From the kernel's tcp_states.h.
TCP_ESTABLISHED = 1


class Mesh:
    """The sockets of one view's communicators. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: set[Address] = set()
        self._peers: set[Address] = set()
        self._stores: dict[int, int] = {}
        self._store_addresses: set[Address] = set()
        self._known: dict[int, int] = {}

    def add_listener(self, address: Address) -> None:
        with self._lock:
            self._listeners.add(address)

    def add_peers(self, addresses: set[Address]) -> None:
        with self._lock:
            self._peers |= addresses - self._listeners

    def add_store(self, addresses: set[Address]) -> None:
        """Record the connections to the view's store that there are now."""
        with self._lock:
            self._store_addresses = addresses
        self.remember_stores()

    def remember_stores(self) -> None:
        """Record a connection to the view's store that was made later, too."""
        with self._lock:
            self._stores |= {fd: inode for fd, inode, _, peer in connections() if peer in self._store_addresses}

    def remember(self) -> dict[int, int]:
        """Record the sockets of a communicator that is complete, and return those that were not known yet."""
        with self._lock:
            new = {fd: inode for fd, inode in self._found().items() if self._known.get(fd) != inode}
            self._known |= new
            return new

    def exchange(self, gone: dict[int, int], new: dict[int, int]) -> None:
        """Forget sockets that were closed, and record others in their place."""
        with self._lock:
            self._known = {fd: inode for fd, inode in self._known.items() if gone.get(fd) != inode} | new

    def _found(self) -> dict[int, int]:
        return {fd: inode for fd, inode, own, peer in connections() if own in self._listeners or peer in self._peers}

    def shut(self, *, unknown: bool = True) -> None:
        """End the connections: who waits for them gets an error. `unknown`: those of a half-made mesh too."""
        with self._lock:
            shut(self._known | (self._found() if unknown else {}))

    def shut_stores(self) -> None:
        """Free who waits for an answer of the store."""
        with self._lock:
            shut(self._stores)

    def is_broken(self) -> bool:
        """Return whether a connection of a complete mesh is no longer there."""
        with self._lock:
            known = dict(self._known)
        return any(state(fd, inode) != TCP_ESTABLISHED for fd, inode in known.items())

    def leave_to_parent(self) -> None:
        """Let go of the connections, in a forked child. Else they outlive the parent, and its peers notice nothing. The
        numbers stay taken, as the child's copy of the communicator will close them once more."""
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for fd, inode in self._known.items():
            with duplicate(fd, inode) as copy:
                if copy is not None:
                    os.dup2(null, fd, inheritable=False)
        os.close(null)


def connections() -> Iterator[tuple[int, int, Address, Address]]:
    """Descriptor, inode, own and peer address of each TCP connection of this process."""
    for fd, inode, sock in tcp_sockets():
        try:
            yield fd, inode, address_of(sock.getsockname()), address_of(sock.getpeername())
        except OSError:
            continue  # not connected, or not any more


def listeners() -> set[Address]:
    found = set()
    for _, _, sock in tcp_sockets():
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            found.add(address_of(sock.getsockname()))
    return found


def tcp_sockets() -> Iterator[tuple[int, int, socket.socket]]:
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - called where milliseconds count
        with duplicate(int(name)) as sock:
            if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6) and is_stream(sock):
                yield int(name), os.fstat(sock.fileno()).st_ino, sock


def is_stream(sock: socket.socket) -> bool:
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE) == socket.SOCK_STREAM


@contextmanager
def duplicate(fd: int, inode: int | None = None) -> Iterator[socket.socket | None]:
    """Return the socket at this descriptor, or None if there is none, or another than `inode`."""
    sock = None
    try:
        copy = os.dup(fd)
        try:
            sock = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)
    except OSError:
        pass
    try:
        if sock is not None and inode is not None and os.fstat(sock.fileno()).st_ino != inode:
            yield None
        else:
            yield sock
    finally:
        if sock is not None:
            sock.close()


def shut(sockets: dict[int, int]) -> None:
    for fd, inode in sockets.items():
        with duplicate(fd, inode) as sock:
            if sock is not None:
                try:
                    sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass  # the other side was faster


def state(fd: int, inode: int) -> int:
    """Return the connection's state as the kernel numbers them; 0 if it is gone."""
    with duplicate(fd, inode) as sock:
        return 0 if sock is None else sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]


def address_of(name: object) -> Address:
    """IPv6 names carry two more fields, and IPv4 peers of an IPv6 socket a prefix."""
    host, port = name[0], name[1]  # type: ignore[index]
    return host.removeprefix("::ffff:"), port
