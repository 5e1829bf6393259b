"""A program that launches jobs by function calls, under torch's names or ours, and tells what came of them.

program.py MODULE METHOD      MODULE: torch.distributed.launcher.api, or holdfast.torchrun
"""

import contextlib
import importlib
import io
import json
import logging
import os
import signal
import sys
import threading
from typing import Any

from torch.distributed.elastic.events import handlers
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

HERE = os.path.dirname(os.path.abspath(__file__))


class Kept(logging.Handler):
    """Keeps the events that a launcher records."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.events.append(json.loads(record.getMessage()))


class Answer:
    """A class of the main module, which workers must find in theirs."""

    def __init__(self, rank: int, text: str) -> None:
        self.rank, self.text = rank, text


def work(text: str, scale: int) -> Answer:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor([scale * dist.get_rank()])
    dist.all_reduce(total)
    dist.destroy_process_group()
    print(f"rank {os.environ['RANK']} of {os.environ['ROLE_NAME']} has {total.item()}", flush=True)
    return Answer(int(os.environ["RANK"]), f"{text} {total.item()} {os.environ['TORCHELASTIC_RESTART_COUNT']}")


def fail(flag: str) -> str:
    if os.environ["RANK"] == "1" and (flag == "always" or os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"):
        raise ValueError("no luck")
    if flag == "always":
        signal.pause()
    return flag


def write() -> None:
    os.write(1, f"rank {os.environ['RANK']}\n".encode())


def interrupt(parent: int) -> None:
    if os.environ["RANK"] == "0":
        os.kill(parent, signal.SIGTERM)
    signal.pause()


def main() -> None:
    api: Any = importlib.import_module(sys.argv[1])
    method = sys.argv[2]

    def launched(entrypoint: Any, *args: Any, restarts: int = 0, method: str = method, handler: str = "null") -> Any:
        config = api.LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=2,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            run_id="named",
            role="a role",
            max_restarts=restarts,
            start_method=method,
            event_log_handler=handler,
            logs_specs=DefaultLogsSpecs(tee=Std.OUT),
        )
        return api.elastic_launch(config, entrypoint)(*args)

    def results() -> Any:
        return [[rank, one.rank, one.text] for rank, one in sorted(launched(work, "r${local_rank}", 3).items())]

    def restart() -> Any:
        return launched(fail, "once", restarts=1)

    def failure() -> Any:
        try:
            launched(fail, "always")
        except ChildFailedError as error:
            rank, found = error.get_first_failure()
            text = found.message["message"] if isinstance(found.message, dict) else found.message
            return [error.name, rank, found.local_rank, found.exitcode, text]

    def received() -> Any:
        before = signal.getsignal(signal.SIGTERM)
        try:
            launched(interrupt, os.getpid())
        except SignalException as error:
            is_restored = signal.getsignal(signal.SIGTERM) is before
            return [int(error.sigval), str(error).replace(str(os.getpid()), "PID"), is_restored]

    def command() -> Any:
        return launched(sys.executable, "-u", f"{HERE}/tells.py", "a b")

    def failed_command() -> Any:
        try:
            launched(sys.executable, "-c", "raise SystemExit(5)")
        except ChildFailedError as error:
            return [error.name, sorted({found.exitcode for found in error.failures.values()} - {-signal.SIGTERM})]

    def closure() -> Any:
        captured = {"a": [1]}
        return launched(lambda: captured["a"][0] + int(os.environ["RANK"]))

    def captured() -> Any:
        """What is printed where sys.stdout is not descriptor 1, and the agent's last event."""
        handlers._log_handlers["kept"] = kept = Kept()
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            launched(write, handler="kept")
        ended = [event for event in kept.events if event["source"] == "AGENT"]
        last = {name: ended[-1]["metadata"][name] for name in ("run_id", "role", "state", "rdzv_backend", "raw_error")}
        return [sorted(printed.getvalue().splitlines()), ended[-1]["name"], last]

    steps = (results, restart, failure, received, command, failed_command, captured, closure)
    stages = {stage.__name__: stage for stage in steps}
    told = {name: stages[name]() for name in sys.argv[3:]}
    told["threads"] = threading.active_count()
    print(json.dumps(told))


if __name__ == "__main__":
    main()
