"""What Holdfast asks of whatever runs the nodes.

    local         a list in the state directory, which masters of the same directory share
    Kubernetes    cordon and uncordon, annotations of Node objects
    Slurm         drain and resume with a reason, a node's comment

A machine is named as the platform names it (`--machine`): the Node object's name, Slurm's NodeName, a host's name.
Calls may block and may fail (with a HoldfastError); whoever makes them in a job does so in a thread, and goes on
without.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol

from holdfast.core.health.reputation import Mark
from holdfast.errors import UsageError

ENTRY_POINTS = "holdfast.platforms"
ENVIRONMENT = "HOLDFAST_PLATFORM"
"""Names the platform for all that runs under it: a job's master inherits it from `holdfast run`."""
LOCAL = "local"


class Platform(Protocol):
    """See the top."""

    name: str

    def mark_unschedulable(self, mark: Mark) -> None:
        """Keep the machine from jobs: now until `mark.until`, or until somebody lets it back. Marked twice, the newer
        mark counts."""

    def mark_schedulable(self, machine: str) -> bool:
        """Let it back. Whether it was marked; one that is not marked is left alone."""

    def unschedulable(self) -> dict[str, Mark]:
        """By machine: those that are kept from jobs now, whoever did it."""

    def annotate(self, machine: str, notes: Mapping[str, str]) -> None:
        """Write something down about the machine, for people and for other programs."""

    def annotations(self, machine: str) -> dict[str, str]:
        """What was written down."""


def open_platform(name: str, state_dir: Path) -> Platform:
    """The platform of this name: `local`, or an entry point of the group `holdfast.platforms`, a callable that is given
    the state directory."""
    from holdfast.platforms.local import LocalPlatform

    if name in ("", LOCAL):
        return LocalPlatform(state_dir)
    plugged = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name not in plugged:
        known = ", ".join([LOCAL, *plugged])
        raise UsageError(f"--platform {name} ({ENVIRONMENT}): there is no such platform, there are {known}")
    try:
        made: Platform = plugged[name].load()(state_dir)
    except Exception as error:  # somebody else's module may raise anything
        why = f"{type(error).__name__}: {error}"
        raise UsageError(f"--platform {name} ({ENVIRONMENT}): it cannot be made ({why})") from error
    return made
