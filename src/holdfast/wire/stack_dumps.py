"""Stacks of a worker that nothing of Holdfast runs in: how its agent asks for them, and what it gets.

Each worker that is a fork of the warm interpreter starts with Python's own fault handler on a real-time signal, which
writes the stacks of all threads to a file in the agent's memory. It is C code that allocates nothing and needs no
lock: it works before the script's first line, inside an import or a C extension, and while the main thread holds the
GIL. The agent sends the signal only to a process that has a handler for it: any other would die of it.
"""

from __future__ import annotations

import re
import signal

STACKS_SIGNAL = signal.SIGRTMIN + 13
"""A real-time signal: unlike SIGUSR1 and SIGUSR2, which batch systems and scripts use, these are nearly always free."""
STACKS_VARIABLE = "HOLDFAST_STACKS"
"""Where the worker finds the file."""

_LAUNCH_FILES = ("/holdfast/worker/launch/", "<frozen runpy>")
_FRAME = re.compile(r'^\s+File (".*"), line (\S+) in (.*)$')


def readable_stacks(dump: str) -> str:
    """Return the stacks of a dump in the order of a traceback, the main thread's first, without what differs between
    ranks that do the same (thread ids) and without the frames of Holdfast that start every script."""
    main, others = "", []
    for block in dump.strip().split("\n\n"):
        frames = [match.groups() for line in reversed(block.splitlines()) if (match := _FRAME.match(line))]
        own = [frame for frame in frames if not any(part in frame[0] for part in _LAUNCH_FILES)]
        text = "".join(f"  File {file}, line {line}, in {name}\n" for file, line, name in own or frames)
        if len(own) < len(frames):
            main = f"thread MainThread:\n{text}"
        elif text:
            others.append(f"thread:\n{text}")
    return "\n".join([main, *sorted(others)] if main else sorted(others))
