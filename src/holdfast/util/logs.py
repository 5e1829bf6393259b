"""The logging system of every Holdfast process: loggers of the standard library, with an event key on each message.

    log = get_logger(__name__)
    log.warning("fork-server-died", "the fork server died, starting another", status=9)

The key is stable, so that alerts can be built on it; the text is for people and may change. Fields are shown in both
formats. Agents, masters and commands call `set_up_logging`; in a worker the script owns the configuration of logging,
so Holdfast's messages go wherever the script sends those of the logger `holdfast`.

What is shown where:

    text                 for people: notices, warnings and errors, each a short line. A notice is what the person who
                         started the job wants to read as it runs: its start, an incident, its end
    text, verbose (-v)   every message but those for developers, with process and event key
    json                 the same, for machines
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from typing import Any, Literal, TextIO

from holdfast.util.status_line import STATUS_LINE

LogFormat = Literal["auto", "text", "json"]

LOGGERS = ("holdfast", "asyncio")
"""The loggers that write to stderr. asyncio reports exceptions of tasks whose result nothing has asked for."""
NOTICE = 25
"""The level between info and warning: shown without -v."""
logging.addLevelName(NOTICE, "NOTICE")
MARKS = {logging.WARNING: "! ", logging.ERROR: "!! ", logging.CRITICAL: "!! "}
"""What stands before the text of a line for people, by level."""


class EventLogger:
    """A logger whose messages have an event key, a text and fields."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def debug(self, event: str, text: str, **fields: Any) -> None:
        """Log what only a developer of Holdfast looks for."""
        self._write(logging.DEBUG, event, text, fields)

    def info(self, event: str, text: str, **fields: Any) -> None:
        """Log what happens in a healthy run."""
        self._write(logging.INFO, event, text, fields)

    def notice(self, event: str, text: str, **fields: Any) -> None:
        """Log what the person who started the job wants to read as it runs: one line for each thing."""
        self._write(NOTICE, event, text, fields)

    def warning(self, event: str, text: str, **fields: Any) -> None:
        """Log what a person may have to look at."""
        self._write(logging.WARNING, event, text, fields)

    def error(self, event: str, text: str, *, error: BaseException | None = None, **fields: Any) -> None:
        """Log a failure; with `error`, its traceback."""
        self._write(logging.ERROR, event, text, fields, error)

    def _write(
        self, level: int, event: str, text: str, fields: dict[str, Any], error: BaseException | None = None
    ) -> None:
        if self._logger.isEnabledFor(level):
            extra = {"holdfast_event": event, "holdfast_fields": fields}
            self._logger.log(level, "%s%s", text, in_text(fields), exc_info=error, extra=extra)


def get_logger(name: str) -> EventLogger:
    """Return the logger of a module; `name` is its `__name__`."""
    return EventLogger(name)


def in_text(fields: dict[str, Any]) -> str:
    """Return the fields as they stand behind a message's text: ` (status=9 stderr='...')`."""
    shown = " ".join(
        f"{name}={value!r}" if isinstance(value, str) else f"{name}={value}" for name, value in fields.items()
    )
    return f" ({shown})" if shown else ""


def set_up_logging(log_format: LogFormat, source: str, *, verbose: bool = False) -> None:
    """Log to stderr, what asyncio reports included. `source` says which process writes when several share a console."""
    is_debugged = bool(os.environ.get("HOLDFAST_DEBUG"))
    verbose = verbose or is_debugged
    as_json = log_format == "json"
    handler = ConsoleHandler(sys.stderr)
    handler.setFormatter(
        JsonFormatter(source) if as_json else VerboseFormatter(source) if verbose else PlainFormatter()
    )
    STATUS_LINE.enable(sys.stderr.isatty() and not as_json)
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False
    level = logging.DEBUG if is_debugged else logging.INFO if verbose or as_json else NOTICE
    logging.getLogger("holdfast").setLevel(level)


class ConsoleHandler(logging.StreamHandler[TextIO]):
    """A handler that takes the status line off the terminal before it writes."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        with STATUS_LINE.hidden():
            super().emit(record)


# --- the formats


class PlainFormatter(logging.Formatter):
    """One short line for people: the time, a mark for warnings and errors, the text."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, and below it the traceback if there is one."""
        moment = time.strftime("%H:%M:%S", time.localtime(record.created))
        line = f"holdfast {moment}: {MARKS.get(record.levelno, '')}{record.getMessage()}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class VerboseFormatter(logging.Formatter):
    """One line for people: time, process, a mark for warnings and errors, the text, its fields, its event key."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self._source = source

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, and below it the traceback if there is one."""
        moment = time.strftime("%H:%M:%S", time.localtime(record.created))
        event = getattr(record, "holdfast_event", "")
        text = f"{MARKS.get(record.levelno, '')}{record.getMessage()}"
        line = f"{moment}.{int(record.msecs):03d} {self._source}: {text}"
        line += f" [{event}]" if event else ""
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object a line for machines: time, level, source, event, message, then the fields."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self._source = source

    def format(self, record: logging.LogRecord) -> str:
        """Return the object as text. A field's value that JSON does not know is written as its `str`."""
        fields = getattr(record, "holdfast_fields", {})
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "source": self._source,
            "event": getattr(record, "holdfast_event", ""),
            "message": record.getMessage().removesuffix(in_text(fields)),
        }
        line |= {f"field_{name}" if name in line else name: value for name, value in fields.items()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
