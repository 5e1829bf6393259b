"""The agent as the child of a program that launches a job by a function call (holdfast/torchrun.py).

`python -m holdfast.cli.launched SETTINGS FLAGS…`, with SETTINGS as JSON. It is `holdfast run` and three things more:

    how the job ended is written as JSON to a pipe of the caller's
    if the caller ends, so does the job: the caller holds the other end of a pipe that is never written to
    a function to run is in a memory file, and so will its results be: workers open them in /proc of this process,
    which only this user can; neither is ever on a disk or on a network
"""

from __future__ import annotations

import os
import signal
import sys
import threading

import msgspec

from holdfast.agent.launch.fork_server_process import InheritedServer
from holdfast.cli.child_failures import LaunchReport, child_failures
from holdfast.cli.main import exit_code_of
from holdfast.cli.run import run_job
from holdfast.errors import HoldfastError
from holdfast.wire.launch_messages import CALL_VARIABLE, RESULTS_VARIABLE, CallerSettings


def main() -> None:
    """Run the job, report its end to the caller, exit with the job's code."""
    settings = msgspec.json.decode(sys.argv[1], type=CallerSettings)
    for descriptor in (settings.report, settings.caller, settings.call, settings.results, settings.server):
        if descriptor >= 0:
            os.set_inheritable(descriptor, False)
    threading.Thread(target=_end_with_caller, args=[settings.caller], name="caller-watch", daemon=True).start()
    if settings.results >= 0:
        os.environ[CALL_VARIABLE] = f"/proc/{os.getpid()}/fd/{settings.call}" if settings.call >= 0 else ""
        os.environ[RESULTS_VARIABLE] = f"/proc/{os.getpid()}/fd/{settings.results}"
    report = _run(sys.argv[2:], settings)
    with os.fdopen(settings.report, "wb") as pipe:
        try:
            pipe.write(msgspec.json.encode(report))
        except OSError:
            pass  # the caller has ended
    sys.exit(report.exit_code)


def _run(argv: list[str], settings: CallerSettings) -> LaunchReport:
    inherited = InheritedServer(settings.server_pid, settings.server) if settings.server >= 0 else None
    try:
        result = run_job(argv, inherited)
    except HoldfastError as error:
        return LaunchReport(exit_code=exit_code_of(error), why=str(error))
    failures = child_failures(result.cause, result.failures) if result.exit_code else ()
    return LaunchReport(exit_code=result.exit_code, why=result.why, failures=failures, ranks=result.ranks)


def _end_with_caller(descriptor: int) -> None:
    """Wait for the end of the process that holds the other end of this pipe; then end this one as a signal would."""
    os.read(descriptor, 1)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
