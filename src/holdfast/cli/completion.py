"""`holdfast completion`: completion of commands, flags, values and jobs in bash, zsh and fish.

The shell's script asks `holdfast complete-words -- WORD…` for each completion: the words after `holdfast`, the last of
which is incomplete. The answer has one candidate a line, with a description behind a tab; where there is none, the
shell completes names of files, as for a script and its arguments.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any

from holdfast import exit_codes
from holdfast.errors import UsageError

DESCRIPTION_CHARS_MAX = 60
JOBS_MAX = 50

_BASH = r"""
_holdfast() {
    local line
    COMPREPLY=()
    while IFS= read -r line; do
        COMPREPLY+=("${line%%$'\t'*}")
    done < <(holdfast complete-words -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
}
complete -o default -F _holdfast holdfast
"""
_ZSH = r"""
#compdef holdfast
_holdfast() {
    local line
    local -a candidates
    while IFS= read -r line; do
        candidates+=("${${line%%$'\t'*}//:/\\:}:${line#*$'\t'}")
    done < <(holdfast complete-words -- "${(@)words[2,$CURRENT]}" 2>/dev/null)
    if (( $#candidates )); then
        _describe holdfast candidates
    else
        _files
    fi
}
compdef _holdfast holdfast
"""
_FISH = r"""
function __holdfast
    set --local found (holdfast complete-words -- (commandline -opc)[2..] (commandline -ct) 2>/dev/null)
    if test (count $found) -gt 0
        printf '%s\n' $found
    else
        __fish_complete_path (commandline -ct)
    end
end
complete --command holdfast --no-files --arguments '(__holdfast)'
"""
SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
HELP = """\
usage: holdfast completion {bash,zsh,fish}

Print a script that completes commands, flags, their values and jobs. Have the shell read it when it starts:

  bash   echo 'eval "$(holdfast completion bash)"' >> ~/.bashrc
  zsh    echo 'eval "$(holdfast completion zsh)"' >> ~/.zshrc      (after compinit)
  fish   holdfast completion fish > ~/.config/fish/completions/holdfast.fish
"""


def completion(argv: Sequence[str]) -> int:
    """Print the script for a shell; return the exit code."""
    match argv:
        case [shell] if shell in SCRIPTS:
            print(SCRIPTS[shell].lstrip(), end="")
        case ["-h" | "--help"]:
            print(HELP, end="")
        case [shell]:
            raise UsageError(f"no completion for {shell!r:.40}: there is {', '.join(SCRIPTS)}")
        case _:
            raise UsageError("name the shell: holdfast completion bash, zsh or fish")
    return exit_codes.SUCCESS


def complete_words(argv: Sequence[str]) -> int:
    """Print the candidates for the last of the words after `--`; return the exit code."""
    words = list(argv[1:] if argv[:1] == ["--"] else argv) or [""]
    for name, text in candidates(words):
        description = " ".join(text.split())[:DESCRIPTION_CHARS_MAX]
        print(f"{name}\t{description}")
    return exit_codes.SUCCESS


def candidates(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield what the last word may become, with a description each."""
    *before, last = words
    found = _flags_of_run(before[1:], last) if before[:1] in (["run"], ["check"]) else _below_app(before, last)
    for name, text in found:
        if name.startswith(last):
            yield name, text


def _flags_of_run(before: Sequence[str], last: str) -> Iterator[tuple[str, str]]:
    """Yield flags, or the values of the flag before; nothing behind the script, whose arguments are its own."""
    from holdfast.cli.run_flag_table import FLAGS, HELP

    by_spelling = {spelling: flag for flag in (HELP, *FLAGS) for spelling in flag.spellings}
    waiting = list(before)
    while waiting:
        flag = by_spelling.get(waiting.pop(0).partition("=")[0])
        if flag is None:
            return
        if flag.metavar is not None and "=" not in before[len(before) - len(waiting) - 1]:
            if not waiting:
                yield from ((choice, "") for choice in flag.choices or ())
                return
            waiting.pop(0)
    if last.startswith("-"):
        for flag in (HELP, *FLAGS):
            yield flag.name, flag.help


def _below_app(before: Sequence[str], last: str) -> Iterator[tuple[str, str]]:
    """Yield commands, options, their values or jobs, by the tree of commands that typer makes."""
    import typer

    from holdfast.cli.main import build_app

    command: Any = typer.main.get_command(build_app())
    expects: Any = None
    for word in before:
        if expects is not None:
            expects = None
        elif word.startswith("-"):
            option = next((one for one in command.params if word in one.opts), None)
            expects = option if option is not None and not getattr(option, "is_flag", False) else None
        elif below := getattr(command, "commands", {}):
            if word not in below:
                return
            command = below[word]
    if expects is not None:
        if isinstance(expects.default, Enum):  # options with a choice of values have a default
            yield from ((str(choice.value), "") for choice in type(expects.default))
        return
    if last.startswith("-"):
        for one in command.params:
            yield from ((name, getattr(one, "help", "") or "") for name in one.opts if name.startswith("--"))
        yield "--help", "Show this message and exit."
        return
    for name, below in sorted(getattr(command, "commands", {}).items()):
        if not below.hidden:
            yield name, below.get_short_help_str()
    if any((getattr(one, "metavar", "") or "").startswith("JOB") for one in command.params):
        yield from ((name, "a job") for name in _jobs())


def _jobs() -> list[str]:
    """Return the newest jobs of the state directory."""
    from holdfast.cli.options import STATE_DIR_DEFAULT
    from holdfast.observe.stored_jobs import job_directories
    from holdfast.util.state_directory import state_directory

    try:
        state_dir = state_directory(os.environ.get("HOLDFAST_STATE_DIR") or STATE_DIR_DEFAULT)
        return [directory.name for directory in job_directories(state_dir)[:JOBS_MAX]]
    except (OSError, UsageError):
        return []
