"""How the loop of the steps was left: by choice (`break`, `return`), or by an exception that passes through it.

Both close the generator of the steps, which sees GeneratorExit in either case. After a `break` the training is over;
after an exception, or sys.exit() with an error, this worker has failed like any other and is replaced. Python does not
tell them apart, so the loop's frame is looked at: what closes a generator by choice is the instruction that drops the
iterator, or returns, or overwrites the variable that holds it. Anything else is an instruction that has raised.

    for step in job.steps(n):
        with step: …
        if is_good_enough: break       POP_TOP: by choice
        upload(…)                      CALL: an exception passes

Generators between the loop and ours (tqdm, a generator of the user's) are passed over. Where it cannot be told, as with
`zip` or `islice` that ended (FOR_ITER, with or without an error), the loop counts as not left; if the script ends well
all the same, it is left then (`Job._at_exit`).
"""

from __future__ import annotations

import dis
import inspect
from types import FrameType

CHOICES = ("POP_TOP", "POP_ITER", "END_FOR", "RETURN", "STORE_", "DELETE_")
"""What the names of instructions begin with that let go of an iterator without an error."""


def is_left_by_choice(generator: FrameType | None) -> bool:
    """Return whether the frame of a generator is being closed because the loop over it was left by choice."""
    frame = generator
    while frame is not None and frame.f_code.co_flags & inspect.CO_GENERATOR:
        frame = frame.f_back
    if frame is None or not 0 <= frame.f_lasti < len(frame.f_code.co_code):
        return False
    return dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith(CHOICES)
