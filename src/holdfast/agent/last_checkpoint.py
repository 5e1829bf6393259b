"""Where a job that failed can go on from, for its last words. Looks at names only: the next start reads and checks."""

from __future__ import annotations

import re
from pathlib import Path

NAME = re.compile(r"step-(\d+)$")
MANIFEST = "manifest.json"
"""As state/checkpoint.py has them; importing that would load torch into the agent."""


def find_last_checkpoint(root: Path) -> Path | None:
    """The newest that is complete; None where there is none or nobody can look."""
    try:
        named = [(int(match[1]), path) for path in root.iterdir() if (match := NAME.match(path.name))]
        return next((path for _, path in sorted(named, reverse=True) if (path / MANIFEST).is_file()), None)
    except OSError:
        return None
