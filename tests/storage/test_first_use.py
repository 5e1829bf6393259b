"""What several threads do at once may be the first that the process does of its kind."""

import subprocess
import sys
from pathlib import Path


def test_notes_and_heads_are_first_read_by_many_threads() -> None:
    script = Path(__file__).parent / "scripts" / "first_use.py"
    assert subprocess.run([sys.executable, str(script)], check=False, timeout=100.0).returncode == 0
