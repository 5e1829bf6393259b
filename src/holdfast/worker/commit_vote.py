"""What the ranks of a view tell one another at the barrier of a step, in one exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from holdfast.errors import ScriptError, StateConflictError
from holdfast.worker.engine_interfaces import EngineCollectives


class CommitVote(NamedTuple):
    """What a rank says at the barrier of a step. The maximum of each number over all ranks is the answer, so a number
    of which the lowest counts too is said twice, once negative."""

    step: int
    negative_step: int
    newest_view: int
    """The newest view that the rank's agent has told it of: all change to it together, after this step."""
    saw_tail: int
    """Whether a collective followed an update, in this step or one before."""
    is_copy_dear: int
    """Whether a copy of the state takes a noticeable part of the step."""
    data_mark: int
    negative_data_mark: int
    """A checksum of where the loaders stand; it differs where they do."""
    values_mark: int
    negative_values_mark: int
    """A checksum of the plain values that are tracked (state/plain_values.py)."""
    update_mark: int
    negative_update_mark: int
    """A checksum of whether this step makes an update, and of the optimizers' settings."""
    wants_replica_check: int
    loss: int
    """The loss that was logged in the last committed step, by the lowest rank that has one (shown_loss.py)."""

    def agree(self, snapshots: Sequence[int], collectives: EngineCollectives) -> tuple[CommitVote, list[int]]:
        """Return what all ranks say, and the same of their snapshots, in one exchange: it is the barrier. Raises
        StateConflictError or ScriptError if the ranks do not make the same step of the same data."""
        values = collectives.agree((*self, *snapshots))
        answer = CommitVote(*values[: len(self)])
        if answer.step != -answer.negative_step:
            raise StateConflictError(
                f"the ranks are at steps {-answer.negative_step} to {answer.step}: they do not run the same program"
            )
        if answer.data_mark != -answer.negative_data_mark:
            raise ScriptError(
                "the ranks' loaders are at different steps, or skip different ones: draw from the same ones on every"
                " rank, chosen by step.number, not by a variable that an earlier step has set: a replacement does not"
                " have it"
            )
        if answer.values_mark != -answer.negative_values_mark:
            raise ScriptError(
                "the plain values named in job.track differ between ranks: compute each from the same numbers on all"
                " ranks (all-reduce a loss before it is compared), or give each rank its own in job.track_local(…)"
            )
        if answer.update_mark != -answer.negative_update_mark:
            raise other_updates(answer.step)
        return answer, values[len(self) :]


def other_updates(step: int) -> ScriptError:
    """Return what is wrong with ranks that do not make the same update."""
    return ScriptError(
        f"the ranks do not make the same update in step {step}: an optimizer steps on some of them only, or has another"
        " learning rate or setting there. It depends on something that is not tracked, such as a counter of the"
        " script's own: derive it from step.number, or track it (job.track(updates=0), then job.values.updates += 1)"
    )
