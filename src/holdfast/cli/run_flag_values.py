"""From the text of a flag to its value. Each function is pure and refuses with the remedy.

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

from holdfast.core.ladder import LADDER, Strategy
from holdfast.errors import UsageError
from holdfast.storage.retention import parse_policy

BACKENDS = ("static", "c10d", "etcd", "etcd-v2", "holdfast")
PORT_MAX = 65535

# The two that no process can catch.
_UNCATCHABLE = ("SIGKILL", "SIGSTOP")
# No argument and no environment variable can hold this character, so it can stand for an escaped comma.
_COMMA_MARK = "\0"
_ENDPOINT = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.]+(?:%\w+)?)\]|(?P<name>[\w.-]+))(?::(?P<port>.*))?")
_YES, _NO = ("1", "true", "t", "yes", "y"), ("0", "false", "f", "no", "n")


def whole_number(minimum: int, maximum: int | None = None) -> Callable[[str], int]:
    """A parser of whole numbers in a range, both ends included."""
    wanted = f"{minimum} or more" if maximum is None else f"{minimum} to {maximum}"

    def parse(text: str) -> int:
        number = _integer(text)
        if number is None or number < minimum or (maximum is not None and number > maximum):
            raise ArgumentTypeError(f"give a whole number, {wanted}")
        return number

    return parse


def seconds(text: str) -> float:
    """A span of time, zero included. Infinity is refused: every wait here has an end."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ArgumentTypeError("give a time in seconds, 0 or more, as in 2.5")
    return value


def seconds_above_zero(text: str) -> float:
    if (value := seconds(text)) == 0:
        raise ArgumentTypeError("give a time in seconds above 0")
    return value


def comma_separated(text: str) -> list[str]:
    """Split at commas; a doubled comma stands for one that is meant."""
    return [part.replace(_COMMA_MARK, ",") for part in text.replace(",,", _COMMA_MARK).split(",")]


def node_range(text: str) -> tuple[int, int]:
    """The least and the most nodes, from "2" or "1:4"."""
    numbers = [_integer(part) for part in text.split(":")]
    least, most = numbers[0], numbers[-1]
    if len(numbers) > 2 or least is None or most is None:
        raise ArgumentTypeError("give a number of nodes or MIN:MAX, as in 2 or 1:4")
    if least < 1 or most < 1:
        raise ArgumentTypeError("a job has at least one node, give 1 or more")
    if least > most:
        raise ArgumentTypeError(f"the minimum is larger than the maximum, write {most}:{least}")
    return least, most


def workers_per_node(text: str) -> str:
    """A positive count, or a word (auto, cpu, gpu, ...) resolved later, where torch may be asked."""
    count = _integer(text)
    if count is not None and count >= 1:
        return str(count)
    if count is not None or not re.fullmatch(r"[A-Za-z]\w*", text):
        raise ArgumentTypeError("give 1 or more workers, or one of auto, cpu, gpu, xpu")
    return text


def backend(text: str) -> str:
    if text in BACKENDS:
        return text
    near = get_close_matches(text, BACKENDS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"choose {', '.join(BACKENDS[:-1])} or {BACKENDS[-1]}"
    raise ArgumentTypeError(f"no such rendezvous backend, {hint}")


def configuration(text: str) -> dict[str, str]:
    """The pairs of "key=value,key=value"."""
    pairs = [part.partition("=") for part in text.split(",")] if text.strip() else []
    if not all(key.strip() and value.strip() for key, _, value in pairs):
        raise ArgumentTypeError("give key=value pairs with commas between, as in join_timeout=60,is_host=1")
    return {key.strip(): value.strip() for key, _, value in pairs}


def yes_or_no(text: str) -> bool:
    if text.lower() not in _YES + _NO:
        raise ArgumentTypeError("give 1 or 0")
    return text.lower() in _YES


def streams(text: str) -> int | dict[int, int]:
    """A sum of 1 (stdout) and 2 (stderr), from "3" for all workers, or from "0:1,12:2" by local rank."""
    if re.fullmatch("[0-3]", text):
        return int(text)
    if not re.fullmatch("[0-9]+:[0-3](,[0-9]+:[0-3])*", text):
        raise ArgumentTypeError(
            "give 0 (none), 1 (stdout), 2 (stderr) or 3 (both), or LOCAL_RANK:VALUE pairs as in 0:1,1:2"
        )
    pairs = (pair.split(":") for pair in text.split(","))
    return {int(rank): int(value) for rank, value in pairs}


def local_ranks(text: str) -> frozenset[int] | None:
    """The workers whose output is shown; None shows all."""
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
    names = tuple(part.strip() for part in text.split(",")) if text.strip() else ()
    if "none" in names and len(names) > 1:
        raise ArgumentTypeError("none means that nothing is imported ahead: give it alone, or leave it out")
    if not all(word.isidentifier() for name in names for word in name.split(".")):
        raise ArgumentTypeError("give module names with commas between, as in numpy,transformers.models")
    return names


def strategies(text: str) -> tuple[Strategy, ...]:
    """The rungs that may be used, in the ladder's order, whatever the order given. The last one is always there."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in list(LADDER):
            near = get_close_matches(name, LADDER, n=1)
            hint = f"did you mean {near[0]}?" if near else f"choose from {','.join(LADDER)}"
            raise ArgumentTypeError(f"there is no strategy {name!r}, {hint}")
    return tuple(rung for rung in LADDER if rung in names or rung is Strategy.EXIT)


def hang_timeout(text: str) -> float | None:
    """None is the adaptive limit, 0 is none at all."""
    if text == "auto":
        return None
    try:
        return seconds(text)
    except ArgumentTypeError:
        raise ArgumentTypeError(
            "give auto, or a time in seconds as in 60, or 0 to never take a worker for hung"
        ) from None


def snapshots(text: str) -> int:
    """Steps between two snapshots; 0: as it fits; -1: none."""
    words = {"auto": 0, "off": -1}
    if text in words:
        return words[text]
    number = _integer(text)
    if number is None or number < 1:
        raise ArgumentTypeError("give auto, off, or a number of steps like 10")
    return number


UNITS_S = {"s": 1.0, "m": 60.0, "h": 3_600.0}


def steps_or_seconds(text: str) -> tuple[int, float]:
    """`500` steps, `10m`, `never`: steps and seconds, of which one at least is 0."""
    if text == "never":
        return 0, 0.0
    number = _integer(text)
    if number is not None and number > 0:
        return number, 0.0
    if text[-1:] in UNITS_S:
        try:
            time_s = float(text[:-1]) * UNITS_S[text[-1]]
        except ValueError:
            time_s = 0.0
        if 0.0 < time_s < math.inf:
            return 0, time_s
    raise ArgumentTypeError("give steps like 500, a time like 90s, 10m or 2h, or never")


def retention(text: str) -> str:
    """Checked, and kept as it is."""
    try:
        parse_policy(text)
    except UsageError as error:
        raise ArgumentTypeError(str(error)) from None
    return text


def extension_name(text: str) -> str:
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*::[^\W\d]\w*", text):
        raise ArgumentTypeError("give module::Class, as in my_package.failover::Mine")
    return text


def node_name(text: str) -> str:
    """Names reach file names and log lines, so their alphabet and length are bounded."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}", text):
        raise ArgumentTypeError(
            "give 1 to 128 letters, digits, dots, dashes, colons or underscores, with a letter or digit first"
        )
    return text


def endpoint(text: str, port_default: int) -> tuple[str, int]:
    """Host and port of "host", "host:29400" or "[::1]:29400"."""
    match = _ENDPOINT.fullmatch(text.strip())
    if match is None:
        raise ArgumentTypeError("give HOST:PORT, with an IPv6 address in brackets, as in [::1]:29400")
    port = port_default if match["port"] is None else _integer(match["port"])
    if port is None or not 0 <= port <= PORT_MAX:
        raise ArgumentTypeError(f"the port must be a number from 0 to {PORT_MAX}, as in host:29400 or [::1]:29400")
    return _loopback_named(match["six"] or match["name"]), port


def host(text: str) -> str:
    """A host alone; its port has a flag of its own."""
    bare = text.strip().removeprefix("[").removesuffix("]")
    if bare.count(":") == 1:
        raise ArgumentTypeError("give the host alone, and its port with --master-port")
    if not re.fullmatch(r"[\w.:%-]+", bare):
        raise ArgumentTypeError("give a host name or an address, as in 10.0.0.1")
    return _loopback_named(bare)


def home_expanded(text: str, environ: Mapping[str, str]) -> str:
    """Replace a leading ~, which a shell leaves alone in `--state-dir=~/runs`."""
    if text != "~" and not text.startswith("~/"):
        return text
    try:
        home = environ.get("HOME") or pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:  # containers often run as a user that no password file knows
        raise ArgumentTypeError("this user has no home directory, give an absolute path") from None
    return home + text[1:]


def _loopback_named(name: str) -> str:
    # "localhost" may resolve to ::1 on one side of a connection and to 127.0.0.1 on the other.
    return "127.0.0.1" if name == "localhost" else name


def _integer(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None
