"""Parsers of flags' values. Each function is pure, and its error says what to write instead.

They raise `ArgumentTypeError`, whose text completes a sentence that begins with what the user wrote:
"--nnodes 3:2: " + "the minimum is larger than the maximum, write 2:3".
"""

import math
import os
import pwd
import re
import signal
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping
from difflib import get_close_matches

from holdfast.core.strategies import LADDER, Strategy
from holdfast.errors import UsageError
from holdfast.storage.retention import parse_policy

BACKENDS = ("static", "c10d", "etcd", "etcd-v2", "holdfast")
PORT_MAX = 65535
COUNT_MAX = 2**31 - 1
NODES_MAX = 1_000_000
WORKERS_MAX = 65_536
SECONDS_MAX = 1e8
"""Three years. Clocks and timers overflow far above."""
JOB_NAME_BYTES_MAX = 128
HANG_TIMEOUT_MIN_S = 0.1
SHOWN_CHARS_MAX = 80
"""How much of a word that a user gave is shown in a message about it."""

# The two that no process can catch.
_UNCATCHABLE = ("SIGKILL", "SIGSTOP")
# No argument and no environment variable can hold this character, so it can stand for an escaped comma.
_COMMA_MARK = "\0"
_ENDPOINT = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.]+(?:%\w+)?)\]|(?P<name>[\w.-]+))(?::(?P<port>.*))?")
_QUOTES = " \t\n'\""
_YES, _NO = ("1", "true", "t", "yes", "y"), ("0", "false", "f", "no", "n")


def shown(text: str) -> str:
    """Return what a user gave as a message shows it: cut, on one line, with escapes for what a terminal would obey."""
    cut = text if len(text) <= SHOWN_CHARS_MAX else f"{text[: SHOWN_CHARS_MAX - 3]}..."
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in cut)


def whole_number(minimum: int, maximum: int | None = None) -> Callable[[str], int]:
    """Return a parser of whole numbers in a range, both ends included."""
    wanted = f"{minimum} or more" if maximum is None else f"{minimum} to {maximum}"
    most = COUNT_MAX if maximum is None else maximum

    def parse(text: str) -> int:
        number = _integer(text)
        if number is not None and number > most:
            raise ArgumentTypeError(f"give a whole number, {minimum} to {most}")
        if number is None or number < minimum:
            raise ArgumentTypeError(f"give a whole number, {wanted}")
        return number

    return parse


def seconds(text: str) -> float:
    """Parse a duration, zero included. Infinity is refused: every wait here has an end."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ArgumentTypeError("give a time in seconds, 0 or more, as in 2.5")
    if value > SECONDS_MAX:
        raise ArgumentTypeError(f"give a time in seconds, {SECONDS_MAX:.0f} at most")
    return value


def seconds_above_zero(text: str) -> float:
    """Parse a duration above zero."""
    if (value := seconds(text)) == 0:
        raise ArgumentTypeError("give a time in seconds above 0")
    return value


def seconds_between_messages(text: str) -> float:
    """Parse the time between two messages that are sent again and again."""
    if (value := seconds(text)) < 0.01:
        raise ArgumentTypeError("give a time in seconds, 0.01 or more")
    return value


_AGE_UNITS_S = {"s": 1, "min": 60, "h": 3_600, "d": 86_400, "w": 604_800}


def age(text: str) -> float:
    """Parse an age with its unit, in seconds."""
    found = re.fullmatch(r"(\d{1,6})(s|min|h|d|w)", text.strip())
    if found is None:
        raise ArgumentTypeError("give an age as a number with its unit: 30d, 12h, 2w, 90min")
    return float(int(found[1]) * _AGE_UNITS_S[found[2]])


def age_or_forever(text: str) -> float | None:
    """Parse an age; None stands for forever."""
    return None if text == "forever" else age(text)


def job_name(text: str) -> str:
    """Parse the name of a job. It becomes the name of directories, a part of URLs and of log lines."""
    is_plain = re.fullmatch(r"\w[\w .:/@+=,~-]*", text) is not None and text.isprintable()
    if text and (not is_plain or len(text.encode()) > JOB_NAME_BYTES_MAX):
        raise ArgumentTypeError(
            f"give at most {JOB_NAME_BYTES_MAX} letters, digits, spaces and . _ - : / @ + = , ~ with a letter or digit"
            " first"
        )
    return text


def comma_separated(text: str) -> list[str]:
    """Split at commas; a doubled comma stands for a literal one."""
    return [part.replace(_COMMA_MARK, ",") for part in text.replace(",,", _COMMA_MARK).split(",")]


def node_range(text: str) -> tuple[int, int]:
    """Parse the least and the most nodes, from "2" or "1:4"."""
    numbers = [_integer(part) for part in text.split(":")]
    least, most = numbers[0], numbers[-1]
    if len(numbers) > 2 or least is None or most is None:
        raise ArgumentTypeError("give a number of nodes or MIN:MAX, as in 2 or 1:4")
    if least < 1 or most < 1:
        raise ArgumentTypeError("a job has at least one node, give 1 or more")
    if most > NODES_MAX:
        raise ArgumentTypeError(f"a job has at most {NODES_MAX} nodes")
    if least > most:
        raise ArgumentTypeError(f"the minimum is larger than the maximum, write {most}:{least}")
    return least, most


def workers_per_node(text: str) -> str:
    """Parse a positive count, or a word (auto, cpu, gpu, ...) that is resolved later with torch."""
    count = _integer(text)
    if count is not None and count > WORKERS_MAX:
        raise ArgumentTypeError(f"a node has at most {WORKERS_MAX} workers")
    if count is not None and count >= 1:
        return str(count)
    if count is not None or not re.fullmatch(r"[A-Za-z]\w*", text):
        raise ArgumentTypeError("give 1 or more workers, or one of auto, cpu, gpu, xpu")
    return text


def backend(text: str) -> str:
    """Parse the name of a rendezvous backend."""
    if text in BACKENDS:
        return text
    near = get_close_matches(text, BACKENDS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"choose {', '.join(BACKENDS[:-1])} or {BACKENDS[-1]}"
    raise ArgumentTypeError(f"no such rendezvous backend, {hint}")


def configuration(text: str) -> dict[str, str]:
    """Parse the pairs of "key=value,key=value". Quotes that no shell has removed are, as in lists of arguments."""
    pairs = [part.partition("=") for part in text.split(",")] if text.strip(_QUOTES) else []
    found = {key.strip(_QUOTES): value.strip(_QUOTES) for key, _, value in pairs}
    if not all(key and value for key, value in found.items()):
        raise ArgumentTypeError("give key=value pairs with commas between, as in join_timeout=60,is_host=1")
    return found


def yes_or_no(text: str) -> bool:
    """Parse 1 or 0, yes or no, true or false."""
    if text.lower() not in _YES + _NO:
        raise ArgumentTypeError("give 1 or 0")
    return text.lower() in _YES


def streams(text: str) -> int | dict[int, int]:
    """Parse a sum of 1 (stdout) and 2 (stderr): "3" for all workers, or "0:1,12:2" by local rank."""
    if re.fullmatch("[0-3]", text):
        return int(text)
    if not re.fullmatch("[0-9]+:[0-3](,[0-9]+:[0-3])*", text):
        raise ArgumentTypeError(
            "give 0 (none), 1 (stdout), 2 (stderr) or 3 (both), or LOCAL_RANK:VALUE pairs as in 0:1,1:2"
        )
    found: dict[int, int] = {}
    for rank, value in (pair.split(":") for pair in text.split(",")):
        if (number := _integer(rank)) is None or number > WORKERS_MAX:
            raise ArgumentTypeError(f"give local ranks up to {WORKERS_MAX}, as in 0:1,1:2")
        found[number] = int(value)
    return found


def local_ranks(text: str) -> frozenset[int] | None:
    """Parse the workers whose output is shown; None shows all."""
    if not text:
        return None
    try:
        ranks = frozenset(int(part) for part in text.split(","))
    except ValueError:
        ranks = frozenset({-1})
    if min(ranks) < 0:
        raise ArgumentTypeError("give local ranks with commas between, as in 0,1,2")
    return ranks


def signal_names(text: str) -> tuple[str, ...]:
    """Parse names of signals that a process can handle."""
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name in _UNCATCHABLE:
            raise ArgumentTypeError(f"no process can handle {name}, leave it out")
        if name not in signal.Signals.__members__:
            near = get_close_matches(name.upper(), signal.Signals.__members__, n=1)
            hint = f"did you mean {near[0]}?" if near else "give names such as SIGTERM,SIGUSR1"
            raise ArgumentTypeError(f"there is no signal {name!r}, {hint}")
    return names


def module_names(text: str) -> tuple[str, ...]:
    """Parse names of Python modules, or `none`."""
    names = tuple(part.strip() for part in text.split(",")) if text.strip() else ()
    if "none" in names and len(names) > 1:
        raise ArgumentTypeError("none means that nothing is imported ahead: give it alone, or leave it out")
    if not all(word.isidentifier() for name in names for word in name.split(".")):
        raise ArgumentTypeError("give module names with commas between, as in numpy,transformers.models")
    return names


def strategies(text: str) -> tuple[Strategy, ...]:
    """Parse the strategies that may be used. They are tried in the ladder's order; the last one is always included."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in list(LADDER):
            near = get_close_matches(name, LADDER, n=1)
            hint = f"did you mean {near[0]}?" if near else f"choose from {','.join(LADDER)}"
            raise ArgumentTypeError(f"there is no strategy {name!r}, {hint}")
    return tuple(rung for rung in LADDER if rung in names or rung is Strategy.EXIT)


CORDON_FLOOR = 3
"""What a share of the nodes comes to at least."""


def cordon_limit(text: str) -> tuple[int, float]:
    """Parse how many nodes may be cordoned within a day: `5` into (5, 0), `2%` into the floor and the share."""
    if text.endswith("%"):
        try:
            percent = float(text[:-1])
        except ValueError:
            percent = -1.0
        if 0 < percent <= 100:
            return CORDON_FLOOR, percent / 100
    elif (number := _integer(text)) is not None and 0 <= number <= COUNT_MAX:
        return number, 0.0
    raise ArgumentTypeError("give a number of nodes like 5, or a share of them like 1%")


def shown_cordon_limit(limit: tuple[int, float]) -> str:
    """Return the limit as the flag takes it."""
    number, share = limit
    return f"{share * 100:g}%" if share else str(number)


def seconds_or_auto(text: str) -> float | None:
    """Parse a time in seconds; None is what suits."""
    if text == "auto":
        return None
    try:
        return seconds(text)
    except ArgumentTypeError:
        raise ArgumentTypeError("give auto, or a time in seconds as in 600, or 0 for no wait") from None


def hang_timeout(text: str) -> float | None:
    """Parse the time limit for hangs: None is adaptive, 0 is no limit."""
    if text == "auto":
        return None
    try:
        limit_s = seconds(text)
    except ArgumentTypeError:
        raise ArgumentTypeError("give auto, or a time in seconds as in 60, or 0 for no hang detection") from None
    if 0 < limit_s < HANG_TIMEOUT_MIN_S:
        raise ArgumentTypeError(f"give {HANG_TIMEOUT_MIN_S} seconds or more: every worker is without progress for less")
    return limit_s


def snapshots(text: str) -> int:
    """Parse the steps between two snapshots; 0: adaptive; -1: none."""
    words = {"auto": 0, "off": -1}
    if text in words:
        return words[text]
    number = _integer(text)
    if number is None or not 1 <= number <= COUNT_MAX:
        raise ArgumentTypeError("give auto, off, or a number of steps like 10")
    return number


UNITS_S = {"s": 1.0, "m": 60.0, "h": 3_600.0}


def steps_or_seconds(text: str) -> tuple[int, float]:
    """Parse `500` (steps), `10m` or `never` into steps and seconds, of which at least one is 0."""
    if text == "never":
        return 0, 0.0
    number = _integer(text)
    if number is not None and 0 < number <= COUNT_MAX:
        return number, 0.0
    if text[-1:] in UNITS_S:
        try:
            time_s = float(text[:-1]) * UNITS_S[text[-1]]
        except ValueError:
            time_s = 0.0
        if 0.0 < time_s <= SECONDS_MAX:
            return 0, time_s
    raise ArgumentTypeError("give steps like 500, a time like 90s, 10m or 2h, or never")


def retention(text: str) -> str:
    """Check a retention policy and return it unchanged."""
    try:
        parse_policy(text)
    except UsageError as error:
        raise ArgumentTypeError(str(error)) from None
    return text


def extension_name(text: str) -> str:
    """Parse the name of a failover extension, module::Class."""
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*::[^\W\d]\w*", text):
        raise ArgumentTypeError("give module::Class, as in my_package.failover::Mine")
    return text


def node_name(text: str) -> str:
    """Parse the name of a node. It reaches file names and log lines, so its alphabet and length are bounded."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}", text):
        raise ArgumentTypeError(
            "give 1 to 128 letters, digits, dots, dashes, colons or underscores, with a letter or digit first"
        )
    return text


def endpoint(text: str, port_default: int) -> tuple[str, int]:
    """Parse host and port from "host", "host:29400" or "[::1]:29400"."""
    match = _ENDPOINT.fullmatch(text.strip())
    if match is None:
        raise ArgumentTypeError("give HOST:PORT, with an IPv6 address in brackets, as in [::1]:29400")
    port = port_default if match["port"] is None else _integer(match["port"])
    if port is None or not 0 <= port <= PORT_MAX:
        raise ArgumentTypeError(f"the port must be a number from 0 to {PORT_MAX}, as in host:29400 or [::1]:29400")
    return _loopback_named(_resolvable(match["six"] or match["name"])), port


def host(text: str) -> str:
    """Parse a host without a port, which has a flag of its own."""
    bare = text.strip().removeprefix("[").removesuffix("]")
    if bare.count(":") == 1:
        raise ArgumentTypeError("give the host alone, and its port with --master-port")
    if not re.fullmatch(r"[\w.:%-]+", bare):
        raise ArgumentTypeError("give a host name or an address, as in 10.0.0.1")
    return _loopback_named(_resolvable(bare))


def _resolvable(name: str) -> str:
    """Return a host's name if one can be looked up that is written so."""
    try:
        name.encode("idna")
    except UnicodeError:
        raise ArgumentTypeError(
            "give a host whose name has 1 to 63 characters between dots, or an address, as in 10.0.0.1"
        ) from None
    return name


def home_expanded(text: str, environ: Mapping[str, str]) -> str:
    """Replace a leading ~ or ~user, which a shell leaves alone in `--state-dir=~/runs`."""
    if "\0" in text:
        raise ArgumentTypeError("a path has no zero bytes")
    if not text.startswith("~"):
        return text
    user, slash, rest = text[1:].partition("/")
    try:
        home = pwd.getpwnam(user).pw_dir if user else environ.get("HOME") or pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:  # containers often run as a user that no password file knows
        text = "no home directory is known for that user" if user else "this user has no home directory"
        raise ArgumentTypeError(f"{text}, give an absolute path") from None
    return home + slash + rest


def _loopback_named(name: str) -> str:
    # "localhost" may resolve to ::1 on one side of a connection and to 127.0.0.1 on the other.
    return "127.0.0.1" if name == "localhost" else name


def _integer(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None
