"""What a person sees: a job on a terminal, stopped by Ctrl-C, and the command that goes on with it, into a pipe."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shlex
import subprocess
import sys
import termios
from pathlib import Path

from holdfast.core.records import IncidentClosed, TrainingResumed
from support.jobs import SCRIPTS, Place, agent_environment, kill9, wait_for

TWO = ("--standalone", "--nproc-per-node", "2")
TIME = r"holdfast \d\d:\d\d:\d\d: "
CLEAR = "\r\x1b[K"


class Terminal:
    """A terminal of its own for a program, as a person's shell gives it: Ctrl-C goes to the whole process group."""

    def __init__(self, words: list[str], state_dir: Path) -> None:
        self._master, slave = pty.openpty()
        os.set_blocking(self._master, False)
        self.process = subprocess.Popen(
            words,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=agent_environment(state_dir) | {"COLUMNS": "200"},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(slave)
        self._shown = ""

    def shown(self) -> str:
        try:
            while data := os.read(self._master, 65_536):
                self._shown += data.decode(errors="replace").replace("\r\n", "\n")
        except OSError:
            pass  # nothing for now, or for ever: the program has ended
        return self._shown

    def press(self, key: bytes) -> None:
        os.write(self._master, key)

    def lines(self) -> list[str]:
        """Return what is left on the screen, line by line."""
        return [kept for line in self.shown().split("\n") if (kept := line.rpartition(CLEAR)[2].strip())]


def test_a_job_is_a_few_lines_and_goes_on_after_ctrl_c_with_the_command_that_it_names(tmp_path: Path) -> None:
    job = Place(tmp_path)
    job.state_dir.mkdir()
    hurry = tmp_path / "hurry"
    script = [str(SCRIPTS / "paced.py"), str(hurry)]
    terminal = Terminal([sys.executable, "-m", "holdfast", "run", *TWO, *script], job.state_dir)
    pids = job.journal.wait_for_workers(2)
    wait_for(lambda: re.search(r"step \d+ of 300 \| .*loss ", terminal.shown()), what="progress")
    kill9(pids[1])
    job.journal.wait_for(IncidentClosed)
    wait_for(lambda: " 1 incident, " in terminal.shown(), what="progress after the incident")
    wait_for(lambda: job.journal.job().state.durability.memory >= 0, what="a state that can be saved")
    terminal.press(b"\x03")
    wait_for(lambda: terminal.process.poll() is not None, what="the end after Ctrl-C")
    assert terminal.process.returncode == 130
    lines = terminal.lines()
    assert "Traceback" not in terminal.shown() and "KeyboardInterrupt" not in terminal.shown()
    assert "waiting for nodes" not in terminal.shown()
    job_id = job.journal.job().job_id
    assert len(lines) == 4, lines
    started, incident, stopping, ended = lines
    assert re.fullmatch(
        TIME + rf"job {job_id}: 2 workers on 1 node; output in \S+; `holdfast status` shows more", started
    )
    assert re.fullmatch(
        TIME + r"incident 1: rank 1 on \S+ killed by SIGKILL; only what had failed was started again; training again"
        r" after \S+ s, at step \d+",
        incident,
    )
    assert re.fullmatch(r"(?:\^C)?" + TIME + r"got Ctrl-C: stopping this node's workers, in at most 30 s", stopping)
    found = re.fullmatch(
        TIME + rf"job {job_id} stopped \(\d+ steps, \S+ s, 1 incident\): ended by Ctrl-C; to go on from"
        r" (\S+/step-\d+), run: (holdfast run .+)",
        ended,
    )
    assert found is not None, ended
    saved, command = found.groups()
    goes_on(job, shlex.split(command)[1:], hurry, job_id, saved)


def goes_on(job: Place, words: list[str], hurry: Path, job_id: str, saved: str) -> None:
    """The command is as it was, with the job's name. Into a pipe it is text, too."""
    hurry.touch()
    again = job.start(*words[1:], command=(sys.executable, "-m", "holdfast", "run"))
    assert words[1:4] == ["--rdzv-id", job_id, "--standalone"] and again.wait() == 0
    step = saved.rpartition("-")[2]
    lines = [line for line in again.stderr.splitlines() if line.startswith("holdfast ")]
    assert re.fullmatch(TIME + rf"resumed at step {step} from {saved}", lines[1])
    assert re.fullmatch(TIME + rf"job {job_id} succeeded: 300 steps, .* s, no incidents", lines[-1])
    (resumed,) = job.journal.of(TrainingResumed)
    assert (resumed.step, resumed.source) == (int(step), saved)
    wide = os.environ | {"COLUMNS": "400"}
    status = [sys.executable, "-m", "holdfast", "status", "--state-dir", str(job.state_dir)]
    page = subprocess.run(status, capture_output=True, text=True, timeout=60, check=True, env=wide)
    assert f"resumed at step {step} from {saved}" in page.stdout


def test_an_exception_that_ends_the_job_is_shown_once_and_the_last_line_is_short(tmp_path: Path) -> None:
    """With the traceback, in the report; what it did to another rank is above that."""
    job = Place(tmp_path)
    plain = (sys.executable, "-m", "holdfast", "run")
    agent = job.start(*TWO, str(SCRIPTS / "raises.py"), command=plain)
    assert agent.wait() == 1
    above, report = agent.stderr.split("root cause: rank 1 on ")
    assert "ValueError: sample 2 is broken" not in above and "in load_batch" not in above
    assert report.count("ValueError: sample 2 is broken") == 1 and report.count("in load_batch") == 1
    last = report.splitlines()[-1]
    assert re.fullmatch(
        TIME + r"!! job \S+ failed \(\S+ s, 1 incident\): rank 1 on \S+ exited with code 1: ValueError;"
        r" no restart is allowed \(--max-restarts 0\)",
        last,
    )
    (log_file,) = job.state_dir.glob("logs/*/attempt_0/1/stderr.log")
    assert "ValueError: sample 2 is broken" in log_file.read_text()
