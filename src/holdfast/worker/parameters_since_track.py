"""Parameters that a script changes between `job.track` and its first step.

    job.track(model=model, optimizer=optimizer)         # restores the state of step 500, when a job starts again
    model.load_state_dict(torch.load("pretrained.pt"))  # and this would put the beginning in its place, on every rank

At a first start that does no harm, and is only warned of: it may be a broadcast that changes nothing after a restart.
Where a state was restored, other bits than those that were restored are refused.
"""

from __future__ import annotations

from holdfast.errors import ScriptError
from holdfast.state.tracked import Tracked
from holdfast.torch_compat import version_of
from holdfast.worker.param_checksums import checksum
from holdfast.worker.script_checks import warn_once

REMEDY = "load or initialise the model before job.track"


class ParametersSinceTrack:
    """The parameters as `job.track` left them, in one worker."""

    def __init__(self) -> None:
        self._versions: list[int] = []
        self._restored: tuple[int, int] | None = None
        """The step that was restored, and a checksum of the parameters then."""

    def begin(self, tracked: Tracked) -> None:
        """Remember what the parameters are; everything is tracked, and nothing restored yet."""
        self._versions = _versions_of(tracked)

    def restored(self, tracked: Tracked, step: int) -> None:
        """Remember what was restored."""
        self._versions, self._restored = _versions_of(tracked), (step, checksum(tracked.parameters()))

    def check(self, tracked: Tracked) -> None:
        """Raise ScriptError if the script has replaced what was restored; warn if it would. Before the first step."""
        versions, self._versions = self._versions, []
        restored, self._restored = self._restored, None
        if restored is not None and restored[1] != checksum(tracked.parameters()):
            raise ScriptError(
                f"the script has changed the model's parameters after job.track, which had restored them from step"
                f" {restored[0]}: training would go on from other numbers. {REMEDY.capitalize()}"
            )
        if restored is None and versions and versions != _versions_of(tracked):
            warn_once(
                "after-track",
                "the model's parameters are changed after job.track: when the job is started again, that would replace"
                f" the state that job.track restores, and is refused then. {REMEDY.capitalize()}",
            )


def _versions_of(tracked: Tracked) -> list[int]:
    return [version_of(one) for one in tracked.parameters()]
