"""What Holdfast asks of the platform that runs the nodes.

    local         a list in the state directory, which masters of the same directory share
    Kubernetes    cordon and uncordon, annotations of Node objects
    Slurm         drain and resume with a reason, a node's comment

A machine is named as the platform names it (`--machine`): the Node object's name, Slurm's NodeName, a host's name.
Calls may block and may fail (with a HoldfastError); in a job they are made in a thread, and a failure is logged.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol

from holdfast.core.health.reputation import CordonMark
from holdfast.errors import UsageError

ENTRY_POINTS = "holdfast.platforms"
ENVIRONMENT = "HOLDFAST_PLATFORM"
"""The variable that names the platform: a job's master inherits it from `holdfast run`."""
LOCAL = "local"


class Platform(Protocol):
    """A platform: excludes machines from jobs and annotates them."""

    name: str

    def mark_unschedulable(self, mark: CordonMark) -> None:
        """Exclude a machine from jobs until `mark.until`, or until it is marked schedulable. The newest mark counts."""

    def mark_schedulable(self, machine: str) -> bool:
        """Remove the mark of a machine; return whether it had one."""

    def unschedulable(self) -> dict[str, CordonMark]:
        """Return the marks of machines that are excluded now, whatever set them, by machine."""

    def annotate(self, machine: str, notes: Mapping[str, str]) -> None:
        """Store notes about a machine, for people and for other programs."""

    def annotations(self, machine: str) -> dict[str, str]:
        """Return the notes about a machine."""


def open_platform(name: str, state_dir: Path) -> Platform:
    """Return the platform of this name: `local`, or an entry point of the group `holdfast.platforms`, a callable that
    is given the state directory."""
    from holdfast.platforms.local_platform import LocalPlatform

    if name in ("", LOCAL):
        return LocalPlatform(state_dir)
    plugged = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name not in plugged:
        known = ", ".join([LOCAL, *plugged])
        raise UsageError(f"--platform {name} ({ENVIRONMENT}): there is no such platform; known are {known}")
    try:
        made: Platform = plugged[name].load()(state_dir)
    except Exception as error:  # a plug-in may raise anything
        why = f"{type(error).__name__}: {error}"
        raise UsageError(f"--platform {name} ({ENVIRONMENT}): it failed to load ({why})") from error
    return made
