"""Where workers' output goes, by torchrun's flags; and the ways to say what to run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from support.jobs import SCRIPTS, SPAWN, Place, free_port

PRINTS = str(SCRIPTS / "prints.py")
TWO = ("--standalone", "--nproc-per-node", "2", *SPAWN)


def console(job: Place, *flags: str, script: str = PRINTS, **choices: Any) -> tuple[list[str], list[str]]:
    """What workers' lines the agent showed on its stdout and its stderr."""
    agent = job.start(*TWO, *flags, script, **choices)
    assert agent.wait() == 0
    own = [line for line in agent.stderr.splitlines() if not line.startswith("{")]
    return sorted(agent.stdout.splitlines()), sorted(own)


OUT = [f"out {rank} attempt 0" for rank in (0, 1)]
ERR = [f"err {rank} attempt 0" for rank in (0, 1)]


@pytest.mark.parametrize(
    ("flags", "out", "err"),
    [
        ((), OUT, ERR),
        (("-r", "3"), [], []),
        (("-r", "1"), [], ERR),
        (("-r", "0:1,1:2"), [OUT[1]], [ERR[0]]),
        (("-t", "3"), [f"[default{i}]:{OUT[i]}" for i in (0, 1)], [f"[default{i}]:{ERR[i]}" for i in (0, 1)]),
        (("-t", "0:1", "-r", "3"), [f"[default0]:{OUT[0]}"], []),
        (("--local-ranks-filter", "1"), [OUT[1]], [ERR[1]]),
        (("--local-ranks-filter", "0", "-t", "3", "--role", "r"), ["[r0]:" + OUT[0]], ["[r0]:" + ERR[0]]),
    ],
)
def test_the_console_shows_what_the_flags_say_and_the_files_have_it_all(
    tmp_path: Path, flags: tuple[str, ...], out: list[str], err: list[str]
) -> None:
    job = Place(tmp_path)
    assert console(job, "--log-dir", str(tmp_path / "logs"), "--rdzv-id", "named", *flags) == (out, err)
    (run,) = (tmp_path / "logs").iterdir()
    for rank in (0, 1):
        directory = run / "attempt_0" / str(rank)
        assert (directory / "stdout.log").read_text() == OUT[rank] + "\n"
        assert (directory / "stderr.log").read_text() == ERR[rank] + "\n"


def test_the_files_are_where_torchrun_puts_them(tmp_path: Path) -> None:
    """One directory for each attempt, in it one for each local rank. (torchrun makes files only where it redirects.)"""
    trees, last_lines = {}, {}
    for name in ("ours", "theirs"):
        job = Place(tmp_path / name)
        logs = tmp_path / name / "logs"
        flags: tuple[str, ...] = (
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            f"127.0.0.1:{free_port()}",
            "--rdzv-id",
            "named",
        )
        flags += ("--nproc-per-node", "2", "--max-restarts", "1", "--log-dir", str(logs), "-r", "3")
        agent = job.start(*flags, *SPAWN, PRINTS, "3") if name == "ours" else job.torchrun(*flags, PRINTS, "3")
        assert agent.wait() == 0
        (run,) = logs.iterdir()
        assert run.name.startswith("named_")
        trees[name] = sorted(str(path.relative_to(run)) for path in run.rglob("*.log"))
        last_lines[name] = [path.read_text() for path in sorted(run.glob("attempt_1/*/*.log"))]
    assert trees["ours"] == trees["theirs"]
    assert len(trees["ours"]) == 8
    assert last_lines["ours"] == last_lines["theirs"]


def test_no_files_are_made_where_none_are_wanted(tmp_path: Path) -> None:
    job = Place(tmp_path)
    assert console(job, "--log-dir", "/dev/null") == (OUT, ERR)
    assert not list(tmp_path.rglob("stdout.log"))


def test_flags_may_come_from_torchruns_variables(tmp_path: Path) -> None:
    job = Place(tmp_path)
    variables = {"PET_NPROC_PER_NODE": "3", "PET_MAX_RESTARTS": "1", "PET_STANDALONE": "1", "PET_ROLE": "role"}
    agent = job.start(*SPAWN, "-t", "1", PRINTS, env=variables)
    assert agent.wait() == 0
    assert sorted(agent.stdout.splitlines()) == [f"[role{rank}]:out {rank} attempt 0" for rank in (0, 1, 2)]
    assert job.journal.job().settings.restarts_max == 1


def test_the_command_can_be_called_by_its_name(tmp_path: Path) -> None:
    """As `holdfast` beside this interpreter; all other tests call it as `python -m holdfast`."""
    program = Path(sys.executable).parent / "holdfast"
    job = Place(tmp_path)
    assert console(job, command=(str(program), "run", "--log-format", "json")) == (OUT, ERR)


def test_a_usage_error_is_a_sentence_and_starts_nothing(tmp_path: Path) -> None:
    job = Place(tmp_path)
    agent = job.start("--nnodes", "2:1", PRINTS)
    assert agent.wait() == 2
    assert agent.stderr.startswith("holdfast: --nnodes 2:1")
    assert len(agent.stderr.splitlines()) == 1
    assert not agent.stdout
    assert not list(job.state_dir.iterdir())
