"""Every command of the README runs as it is written, and the documents name things that exist."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.records import IncidentClosed, JobFinished, Outcome
from holdfast.journal import read_entries

ROOT = Path(__file__).resolve().parent.parent
ELSEWHERE = ("make demo", "make test", "python3.11 -m venv")
"""How blocks begin that tests/first_contact.py runs (`make first-contact`): they make environments of their own."""


def blocks(language: str) -> Any:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)


def environment(state_dir: Any) -> Any:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return os.environ | {"PATH": path, "HOLDFAST_STATE_DIR": str(state_dir), "OMP_NUM_THREADS": "1"}


def test_the_readme_s_commands_run(tmp_path: Path) -> None:
    commands = [block for block in blocks("bash") if not block.startswith(ELSEWHERE)]
    assert len(commands) == len(blocks("bash")) - 2
    script = "set -eux\n" + "\n".join(commands)
    done = subprocess.run(
        ["bash", "-c", script], cwd=ROOT, env=environment(tmp_path), capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "succeeded" in done.stdout


def test_make_s_targets_are_those_of_the_readme() -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = re.findall(r"^make (\w+)", "".join(blocks("bash")), re.MULTILINE)
    assert named == ["demo", "test"]
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_the_demo_kills_a_worker_and_the_run_goes_on_and_finishes(tmp_path: Path) -> None:
    code = "import demo, pathlib, sys; sys.exit(demo.demonstrate(pathlib.Path(sys.argv[1])))"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=ROOT / "examples",
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=100)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # so that it ends its job: a kill would leave that behind
        process.communicate(timeout=15)
        raise
    assert process.returncode == 0 and "the same bits" in output, output
    records = [entry.record for entry in read_entries(tmp_path / "jobs/demo/journal.sqlite")]
    closed = [record for record in records if isinstance(record, IncidentClosed)]
    assert [incident.view_after for incident in closed] == [2]
    assert "SIGKILL" in closed[0].cause
    assert isinstance(records[-1], JobFinished) and records[-1].outcome is Outcome.SUCCEEDED


@pytest.mark.parametrize("document", sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("bench/*.md")]))
def test_links_lead_somewhere(document: Any) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
        assert (document.parent / target).exists(), f"{document.name} links to {target}"
