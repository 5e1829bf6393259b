"""How Holdfast's own log lines look: one fact a line, for people on a terminal, JSON for everything else."""

from __future__ import annotations

import logging
import os
import sys
from typing import Literal

import structlog


def set_up_logging(log_format: Literal["auto", "text", "json"], source: str) -> None:
    """Log to stderr. `source` says which process speaks when several share a console."""
    as_json = log_format == "json" or (log_format == "auto" and not sys.stderr.isatty())
    level = logging.DEBUG if os.environ.get("HOLDFAST_DEBUG") else logging.INFO
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso" if as_json else "%H:%M:%S.%f", utc=as_json),
            structlog.processors.format_exc_info,
            _as_json(source) if as_json else _as_text(source),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )


def _as_json(source: str) -> structlog.types.Processor:
    render = structlog.processors.JSONRenderer(sort_keys=False)

    def processor(logger: object, method: str, event: structlog.types.EventDict) -> str | bytes:
        ordered = {"time": event.pop("timestamp"), "level": event.pop("level"), "source": source, **event}
        return render(logger, method, ordered)

    return processor


def _as_text(source: str) -> structlog.types.Processor:
    def processor(logger: object, method: str, event: structlog.types.EventDict) -> str:
        mark = {"warning": "! ", "error": "!! ", "critical": "!! "}.get(event["level"], "")
        exception = f"\n{event['exception']}" if "exception" in event else ""
        return f"{event['timestamp'][:12]} {source}: {mark}{event['event']}{exception}"

    return processor
