"""The parser of `holdfast run`: torchrun's command line, with sentences for errors.

argparse alone is not enough, for three reasons. It looks for flags among the script's own arguments, and so
refuses `train.py --log x` because --log might be short for --log-dir or --logs-specs. It calls --nproc
ambiguous because --nproc-per-node and --nproc_per_node both begin with it. And it answers a mistake with
a page of usage. So the words are read here first, up to the script, and argparse gets an unambiguous command line:

    words, environment  ->  --flag=value for each variable that no flag overrules,
                            --flag=value for each flag, spelled out,
                            --, the script and its arguments

Values from the environment pass the same checks, because they become part of the command line. The namespace gets one
name more than the flags, `given`: for each flag that was given, the words or the variable that gave it, which messages
quote.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from holdfast.cli.run_flag_table import FLAGS, GROUPS, HELP, Flag
from holdfast.cli.run_flag_values import shown
from holdfast.errors import UsageError

_NEGATIVE_NUMBER = re.compile(r"-\d+|-\d*\.\d+")
_BY_SPELLING = {spelling: flag for flag in (HELP, *FLAGS) for spelling in flag.spellings}
_EPILOG = """\
Each flag may be written with dashes or underscores, and may come from the variable named in brackets.
What follows SCRIPT belongs to the script.

examples:
  one machine, one worker for each GPU, restarts after faults:
    holdfast run --standalone --nproc-per-node gpu --max-restarts 3 train.py --epochs 10

  a script with a session (holdfast init writes one), and a spare that takes over at once:
    holdfast run --standalone --nproc-per-node 4 --spares 1 --checkpoint-dir ckpt train.py

  two to four machines; the same command on each, the same secret in the file:
    holdfast run --nnodes 2:4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint host0:29400 \\
        --rdzv-id job1 --token-file token train.py

  a module, or a program that is not Python:
    holdfast run --nproc-per-node 2 -m package.train
    holdfast run --nproc-per-node 2 --no-python ./train.sh"""


def build_parser(environ: Mapping[str, str] | None = None) -> argparse.ArgumentParser:
    """Return a parser whose fallbacks come from `environ`, never from the process's own environment."""
    parser = _RunParser(environ or {})
    parser.add_argument(*HELP.spellings, action="help", help=HELP.help)
    for title, flags in GROUPS.items():
        group = parser.add_argument_group(title)
        for flag in flags:
            _add(group, flag)
    parser.add_argument("training_script", metavar="SCRIPT", help="the training script")
    parser.add_argument("training_script_args", metavar="...", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def _add(group: Any, flag: Flag) -> None:
    default = "" if flag.default in (None, "", []) else f" (default {flag.default})".replace("%", "%%")
    variable = f" [{flag.variable}]" if flag.variable else ""
    text = f"{flag.help}{default}{variable}"
    if flag.metavar is None:
        group.add_argument(*flag.spellings, action="store_true", help=text)
        return
    metavar = "{" + ",".join(flag.choices) + "}" if flag.choices else flag.metavar
    group.add_argument(
        *flag.spellings,
        metavar=metavar,
        type=flag.parse,
        default=flag.default,
        choices=flag.choices,
        help=text,
    )


class _RunParser(argparse.ArgumentParser):
    def __init__(self, environ: Mapping[str, str]) -> None:
        super().__init__(
            prog="holdfast run",
            usage="holdfast run [flags] SCRIPT [arguments of the script]",
            description="Start a training script on this node's workers and keep it running.",
            epilog=_EPILOG,
            formatter_class=_Formatter,
            add_help=False,
            exit_on_error=False,
        )
        self._environ = environ

    def parse_known_args(  # type: ignore[override]  # typeshed tells two overloads apart by the namespace's type
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        given: dict[str, str] = {}
        flags, script = _split(sys.argv[1:] if args is None else args, given)
        if HELP.dest in given:
            return super().parse_known_args([HELP.name], namespace)
        if not script or not script[0]:
            raise UsageError("no training script: name it after the flags, as in holdfast run train.py")
        ours = [*_from_environment(self._environ, given), *flags]
        if empty := next((word for word in ours if word.partition("=")[2] == "--"), ""):
            raise UsageError(f"{empty}: -- is no value")  # argparse would drop it, and go on with none
        words = [*ours, "--", *script]
        for word in words:
            if not _is_unicode(word):
                raise UsageError(f"{shown(word)} is not UTF-8 text: give a name that is, or rename the file")
        try:
            namespace, rest = super().parse_known_args(words, namespace)
        except argparse.ArgumentError as error:
            raise UsageError(_sentence(error, given)) from None
        namespace.given = given
        return namespace, rest

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """A formatter that shows one spelling of each flag; the epilog says that there is another."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        flag = _BY_SPELLING.get("".join(action.option_strings[:1]))
        if flag is None:
            return super()._format_action_invocation(action)
        names = f"{flag.short}, {flag.name}" if flag.short else flag.name
        return f"{names} {action.metavar}" if action.nargs is None else names


def _split(words: Sequence[str], given: dict[str, str]) -> tuple[list[str], list[str]]:
    """Return the flags spelled out, and the script with its arguments. Record in `given` what was given."""
    flags: dict[str, str] = {}  # the last of a repeated flag counts
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        if word == "--":
            return [*flags.values()], waiting
        if not word.startswith("-") or word == "-":
            # As torchrun does: one -- between the script and its arguments is for us, not for it.
            return [*flags.values()], [word, *(waiting[1:] if waiting[:1] == ["--"] else waiting)]
        flag, value = _resolve(word)
        if flag.metavar is None:
            if value is not None:
                waiting.insert(0, _rest_of_cluster(flag, word, value))
            flags[flag.dest], given[flag.dest] = flag.name, flag.name
        else:
            value = _value(flag, value, waiting)
            flags[flag.dest], given[flag.dest] = f"{flag.name}={value}", f"{flag.name} {shown(value)}"
    return [*flags.values()], []


def _is_unicode(word: str) -> bool:
    """Return whether a word can be sent to other processes as text; bytes that are none are halves of characters."""
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True


def _resolve(word: str) -> tuple[Flag, str | None]:
    """Return the flag that a word stands for, and its value, if the word has one."""
    name, equals, value = word.partition("=")
    if flag := _BY_SPELLING.get(name):
        return flag, value if equals else None
    if not word.startswith("--"):
        short = _BY_SPELLING.get(word[:2])
        return (short, word[2:]) if short else _unknown(name)
    flags = _abbreviated(name)
    # A flag of ours must not make an abbreviation ambiguous that torchrun understands.
    choices = [flag for flag in flags if not flag.is_ours] or flags
    if len(choices) > 1:
        names = [flag.name for flag in choices]
        raise UsageError(f"{name} is ambiguous: write {', '.join(names[:-1])} or {names[-1]}")
    return (choices[0], value if equals else None) if choices else _unknown(name)


def _abbreviated(prefix: str) -> list[Flag]:
    if prefix == "--":  # from --=value: short for everything, so for nothing
        return []
    return [flag for flag in (HELP, *FLAGS) if any(spelling.startswith(prefix) for spelling in flag.spellings)]


def _unknown(name: str) -> NoReturn:
    name = shown(name)
    wanted = "--" + name.lstrip("-").replace("_", "-")
    near = get_close_matches(wanted, [flag.name for flag in (HELP, *FLAGS)], n=1)
    if near:
        raise UsageError(f"unknown flag {name}: did you mean {near[0]}?")
    raise UsageError(f"unknown flag {name}: holdfast run --help lists the flags; those of the script come after it")


def _value(flag: Flag, value: str | None, waiting: list[str]) -> str:
    if value is not None:
        return value
    if not waiting or _looks_like_flag(waiting[0]):
        raise UsageError(f"{flag.name} needs a value: write {flag.name} {flag.metavar}")
    return waiting.pop(0)


def _looks_like_flag(word: str) -> bool:
    if not word.startswith("-") or word == "-" or _NEGATIVE_NUMBER.fullmatch(word):
        return False
    return " " not in word or word.partition("=")[0] in _BY_SPELLING


def _rest_of_cluster(flag: Flag, word: str, value: str) -> str:
    """Return the rest of joined short flags: -mr3 is -m -r3. Any other value of a switch is refused."""
    if word.startswith("--") or word[2:3] == "=":
        raise UsageError(f"{flag.name} takes no value: write {flag.name} alone, without ={shown(value)}")
    if f"-{value[0]}" not in _BY_SPELLING:
        _unknown(word)
    return f"-{value}"


def _from_environment(environ: Mapping[str, str], given: dict[str, str]) -> Iterator[str]:
    for flag in FLAGS:
        text = environ.get(flag.variable) if flag.variable else None
        # An empty variable of ours is an unset one; torchrun takes an empty PET_ variable at its word.
        if text is None or flag.dest in given or (flag.is_ours and not text):
            continue
        if flag.metavar is None and not _is_on(flag, text):
            continue
        given[flag.dest] = f"{flag.variable}={shown(text)}"
        yield flag.name if flag.metavar is None else f"{flag.name}={text}"


def _is_on(flag: Flag, text: str) -> bool:
    try:
        return int(text) != 0
    except ValueError:
        raise UsageError(f"{flag.variable}={shown(text)}: set it to 1 or 0, or unset it") from None


def _sentence(error: argparse.ArgumentError, given: Mapping[str, str]) -> str:
    flag = _BY_SPELLING.get((error.argument_name or "").split("/")[0])
    if flag is None:
        return error.message
    if flag.choices:
        return f"{given[flag.dest]}: choose {', '.join(flag.choices[:-1])} or {flag.choices[-1]}"
    return f"{given[flag.dest]}: {error.message}"
