"""The same script and flags under torchrun and under Holdfast: what came of each, in a form that can be compared."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.jobs import AgentProcess, Place

HERE = Path(__file__).parents[1] / "conformance"
LAUNCHERS = ("torchrun", "holdfast")
DEADLINE_S = 180.0
"""For a launch; torchrun's own on a busy machine."""
CHANCE = {
    "MASTER_PORT": "a free port",
    "TORCHELASTIC_RUN_ID": "made up if no --rdzv-id is given",
    "HOLDFAST_TEST_ID": "the test's",
}
"""Variables whose values nobody chooses."""
DOC = (HERE.parents[1] / "docs/torchrun.md").read_text()


@dataclass(frozen=True)
class Launch:
    """One launcher's run."""

    place: Place
    agent: AgentProcess

    @property
    def logs(self) -> Path:
        return self.place.directory / "logs"

    def exit_code(self) -> int:
        return self.agent.wait(DEADLINE_S)

    def plain(self, text: str) -> str:
        """The text without what differs by chance: this run's directories."""
        text = re.sub(rf"{re.escape(str(self.logs))}/[^/\s\"']+", "LOGS", text)
        return text.replace(str(self.place.directory), "PLACE")

    def files(self) -> list[str]:
        """What is below the run's own directory of logs."""
        (run,) = self.logs.iterdir()
        return sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file())

    def file(self, name: str) -> str:
        (run,) = self.logs.iterdir()
        return (run / name).read_text()

    def printed(self) -> list[str]:
        """What the console's stdout showed, in any order."""
        return sorted(self.plain(self.agent.stdout).splitlines())

    def complained(self) -> list[str]:
        """What workers wrote to stderr, as the console showed it: their lines begin with "rank", or have a prefix."""
        return sorted(re.findall(r"^(?:\[.*\]:)?rank .*$", self.plain(self.agent.stderr), re.MULTILINE))

    def states(self) -> dict[str, dict[str, Any]]:
        """What state.py has written, by rank and try, without what differs by chance."""
        found = {}
        for path in sorted(self.place.directory.glob("state-*.json")):
            found[path.stem] = json.loads(self.plain(path.read_text()))
        return found


def start(launcher: str, tmp_path: Path, *words: str, env: Mapping[str, str] | None = None, **choices: Any) -> Launch:
    """Start a job; PLACE in its words is its directory, and MEETING in its environment, where ranks can meet."""
    place = Place(tmp_path / launcher)
    full = [
        "--log-dir",
        str(place.directory / "logs"),
        *(word.replace("PLACE", str(place.directory)) for word in words),
    ]
    variables = {"MEETING": str(place.directory), **(env or {})}
    begin = place.torchrun if launcher == "torchrun" else place.start
    return Launch(place, begin(*full, env=variables, **choices))


def both(tmp_path: Path, *words: str, **choices: Any) -> tuple[Launch, Launch]:
    """Run a job under torchrun, then under Holdfast; both have ended."""
    launches = []
    for launcher in LAUNCHERS:
        launch = start(launcher, tmp_path, *words, **choices)
        launch.exit_code()
        launches.append(launch)
    return launches[0], launches[1]


def documented(heading: str) -> set[str]:
    """The first column of the table below a heading of docs/torchrun.md."""
    section = DOC.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\| ([^|]+?) \|", section, re.MULTILINE)
    return {row for row in rows[1:] if set(row) - set("- ")}
