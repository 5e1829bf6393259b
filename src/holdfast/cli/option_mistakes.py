"""The sentence about a mistake in a command line that typer parses, in the form of `holdfast run`'s: the option, what
was given, what to give. Typer shows the text of the library that checks its values."""

from __future__ import annotations

import re
from typing import Any


def mistake_sentence(error: Any) -> str:
    """Return what is wrong, without a full stop, of one of typer's usage errors; "" if it says nothing."""
    parameter = getattr(error, "param", None)
    if parameter is None or not error.message:
        return str(error.format_message()).rstrip(".")
    long = [word for word in parameter.opts if word.startswith("--")]
    name = long[0] if long else (parameter.metavar or parameter.name).rstrip(".")
    try:
        found = error.__cause__.errors()[0]
    except AttributeError:  # refused by a function of ours, or by a typer that checks values itself
        return f"{name}: {error.message}".rstrip(".")
    return f"{name} {found['input']}: {_remedy(found)}"


def _remedy(found: dict[str, Any]) -> str:
    kind: str = found["type"]
    limits = found.get("ctx", {})
    if kind.startswith("int_"):
        return "give a whole number"
    if kind.startswith("float_"):
        return "give a number"
    if kind == "greater_than_equal":
        return f"give {limits['ge']} or more"
    if kind == "less_than_equal":
        return f"give at most {limits['le']}"
    said = found["msg"].removeprefix("Value error, ").rstrip(".")
    if choices := re.search(r" is not one of ('.*')$", said):
        *others, last = re.findall(r"'([^']*)'", choices[1])
        return f"give {', '.join(others)} or {last}" if others else f"give {last}"
    return str(said)
