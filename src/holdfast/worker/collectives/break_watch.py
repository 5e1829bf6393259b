"""Notices that a connection of a group broke, while nothing is sent or received on it too.

The kernel is asked to say so (epoll): a thread sleeps until it does, and costs nothing meanwhile. It asks about
duplicates of gloo's descriptors, as gloo may close its own before the thread has come to look. A duplicate keeps a
connection open that gloo has closed, so who is told of a break shuts them all (`shut`), and who is done closes them.
"""

from __future__ import annotations

import os
import select
import socket
import threading

from holdfast.worker.collectives import sockets

BROKEN = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR


class BreakWatch:
    """The connections of one communicator. `wake` and `shut` may be called from any thread."""

    def __init__(self, watched: dict[int, int], expected: int) -> None:
        """Watch the sockets at these descriptors, with these inodes. If there are fewer than expected, a connection
        broke before anyone looked, and gloo has closed it."""
        self._lock = threading.Lock()
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._call = select.poll()
        self._call.register(self._wake, select.POLLIN)
        self._copies: list[socket.socket] = []
        self.copies: dict[int, int] = {}
        """Descriptor and inode of our duplicates."""
        self._is_closed = False
        for fd, inode in watched.items():
            with sockets.duplicate(fd, inode) as sock:
                if sock is None:
                    continue  # closed already, by a gloo that has noticed
                copy = socket.socket(fileno=os.dup(sock.fileno()))  # its dup() would make gloo's own one block
            self._copies.append(copy)
            self.copies[copy.fileno()] = os.fstat(copy.fileno()).st_ino
            self._epoll.register(copy.fileno(), BROKEN)
        self._is_one_gone = len(self._copies) < expected
        if self._is_one_gone:
            os.eventfd_write(self._wake, 1)

    def wait_for_break(self) -> None:
        """Return when a connection broke, or `wake` was called."""
        self._epoll.poll()
        self._clear()

    def wait_for_call(self, timeout_s: float) -> None:
        """Return when `wake` was called, or the time is up."""
        self._call.poll(timeout_s * 1000)
        self._clear()

    def _clear(self) -> None:
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            pass

    def is_broken(self) -> bool:
        """Return whether a connection has ended, at either side."""
        with self._lock:
            if self._is_closed:
                return False
            states = [copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] for copy in self._copies]
            return self._is_one_gone or any(state != sockets.TCP_ESTABLISHED for state in states)

    def wake(self) -> None:
        with self._lock:
            if not self._is_closed:
                os.eventfd_write(self._wake, 1)

    def shut(self) -> None:
        """End the connections: the other members notice."""
        with self._lock:
            for copy in self._copies:
                try:
                    copy.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass  # the other side was faster

    def close(self) -> None:
        """Let go of all descriptors. No thread may be waiting any more."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            for copy in self._copies:
                copy.close()
            self._copies = []
            self._epoll.close()
            os.close(self._wake)
