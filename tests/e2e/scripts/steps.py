"""A light worker: writes a line at its start and at each step, ends when told to. Needs no torch.

WORK/ledger        what rank local_rank world_size view pid restart_count store_port step
WORK/finish        its presence ends every worker with code 0
WORK/do-RANK       done once, by the worker of that rank: exit CODE | raise TYPE TEXT | kill NUMBER
--trap             SIGTERM, SIGINT and SIGUSR1: write WORK/trapped-RANK with the signal's number, exit 0
--ignore           the same signals: write WORK/ignored-RANK, go on
"""

import builtins
import os
import signal
import sys
import time
from pathlib import Path

work = Path(os.environ["WORK"])
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "HOLDFAST_VIEW")
rank, local_rank, world_size, view = (int(os.environ[name]) for name in names)
facts = [rank, local_rank, world_size, view, os.getpid()]
facts += [int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["MASTER_PORT"])]
ledger = os.open(work / "ledger", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


def note(what: str, step: int) -> None:
    os.write(ledger, (" ".join(map(str, [what, *facts, step])) + "\n").encode())


def write(name: str, text: str) -> None:
    draft = work / f"{name}.draft"
    draft.write_text(text)
    draft.rename(work / name)


def trap(number: int, _: object) -> None:
    write(f"trapped-{rank}", str(number))
    sys.exit(0)


def ignore(number: int, _: object) -> None:
    write(f"ignored-{rank}", str(number))


def obey(words: list[str]) -> None:
    match words:
        case ["exit", code]:
            sys.exit(int(code))
        case ["raise", kind, *text]:
            raise getattr(builtins, kind)(" ".join(text))
        case ["kill", number]:
            os.kill(os.getpid(), int(number))


def take_command() -> list[str]:
    mine = work / f"taken-{rank}-{os.getpid()}"
    try:
        (work / f"do-{rank}").rename(mine)
    except FileNotFoundError:
        return []
    return mine.read_text().split()


handlers = {"--trap": trap, "--ignore": ignore}
for flag in sys.argv[1:]:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, handlers[flag])

note("start", 0)
step = 0
while not (work / "finish").exists():
    obey(take_command())
    time.sleep(0.02)
    step += 1
    note("step", step)
note("end", step)
