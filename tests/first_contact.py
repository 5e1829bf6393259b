"""The new user's path: README's commands in their order, each in the environment that README describes.

    make first-contact

They run in one shell, from a copy of the tree, with a home of their own and no environment of Python's: what README
does not install is not there. `make test` is not run but looked at (it is what the tests are). At the end the time and
the number of printed lines of each command are shown.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEADLINE_S = 900.0
FOREIGN_PREFIXES = ("HOLDFAST_", "PET_", "VIRTUAL_ENV", "PYTHON", "MAKE", "MFLAGS", "OMP_")
NOT_INSTALLED = ("pytest", "ruff", "mypy", "hypothesis")
"""What only the project's own tests need."""


def commands() -> list[str]:
    """Return the commands of README's bash blocks, each with the lines that continue it."""
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in re.split(r"(?<!\\)\n", block) if line.strip()]


def copy_tree(target: Path) -> None:
    """Copy what git knows of, and what it would add."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def environment(home: Path) -> dict[str, str]:
    """Return a new user's: without an environment of Python's, or settings of Holdfast's."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith(FOREIGN_PREFIXES)}
    here = str(Path(sys.prefix) / "bin")
    path = [part for part in kept["PATH"].split(":") if part != here]
    return kept | {"HOME": str(home), "PATH": ":".join(path), "TMPDIR": str(home.parent / "temporary")}


def script(steps: list[str], outputs: Path) -> str:
    """Return one shell script that runs the commands, keeps what each prints, and stops at the first that fails."""
    lines = ["set -eu", "exec 3>&1"]
    for number, command in enumerate(steps):
        first = command.split("#")[0].strip().splitlines()[0]
        runnable = command.replace("make test", "make --dry-run test")
        lines += [
            f"echo {number} $(date +%s.%N) >> {outputs}/times",
            f"cat <<'COMMAND' >&3\n$ {first}\nCOMMAND",
            f"exec > {outputs}/{number} 2>&1",
            runnable,
        ]
    return "\n".join([*lines, f"echo end $(date +%s.%N) >> {outputs}/times", "pip list --format freeze >&3", ""])


def main() -> int:
    """Run them and say how it went; return the exit code."""
    with tempfile.TemporaryDirectory(prefix="holdfast-first-contact-") as name:
        directory = Path(name)
        tree, home, outputs = directory / "holdfast", directory / "home", directory / "outputs"
        for one in (tree, home, outputs, directory / "temporary"):
            one.mkdir()
        copy_tree(tree)
        steps = commands()
        shell = subprocess.Popen(
            ["bash", "-c", script(steps, outputs)],
            cwd=tree,
            env=environment(home),
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        printed = []
        deadline = time.monotonic() + DEADLINE_S
        signal.signal(signal.SIGALRM, lambda *_: os.killpg(shell.pid, signal.SIGKILL))
        signal.alarm(int(DEADLINE_S))
        assert shell.stdout is not None
        for line in shell.stdout:
            printed.append(line)
            if line.startswith("$ "):
                print(line, end="", flush=True)
        code = shell.wait()
        signal.alarm(0)
        if time.monotonic() > deadline:
            print(f"not through in {DEADLINE_S:.0f} s")
        return judge(code, steps, outputs, tree, "".join(printed))


def judge(code: int, steps: list[str], outputs: Path, tree: Path, printed: str) -> int:
    """Print the table, and what is wrong; return the exit code."""
    times = [line.split() for line in (outputs / "times").read_text().splitlines()]
    texts = [(outputs / str(number)).read_text() for number in range(len(times) - (times[-1][0] == "end"))]
    print(f"\n{'seconds':>8} {'lines':>6}")
    for number, text in enumerate(texts):
        end = float(times[number + 1][1]) if number + 1 < len(times) else time.time()
        print(f"{end - float(times[number][1]):8.1f} {len(text.splitlines()):6d}  {steps[number].splitlines()[0][:90]}")
    wrong = [] if code == 0 else [f"exit code {code} from: {steps[len(texts) - 1]}\n{texts[-1][-3000:]}"]
    if code == 0:
        everything = "\n".join(texts)
        wrong += [
            f"{said!r} was not printed" for said in ("the same bits", "succeeded", "wrote ") if said not in everything
        ]
        wrong += [
            f"README installs {name}" for name in NOT_INSTALLED if re.search(rf"^{name}==", printed, re.MULTILINE)
        ]
        wrong += ["make demo made the environment of the tests"] if (tree / ".venv").exists() else []
        demo = [path.name.split("-")[0] for path in tree.glob(".venv-demo/lib/*/site-packages/*.dist-info")]
        wrong += [f"make demo installs {name}" for name in NOT_INSTALLED if name in demo]
    for sentence in wrong:
        print(f"WRONG: {sentence}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
