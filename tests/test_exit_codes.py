"""Exit codes: one number for each meaning, and those of `holdfast run` are documented."""

from __future__ import annotations

import re
from pathlib import Path

from holdfast import exit_codes

CODES = {name: code for name, code in vars(exit_codes).items() if name.isupper()}
OF_OTHER_COMMANDS = {"ADDRESS_TAKEN", "UNFIT", "NO_PROCESS"}


def test_no_two_meanings_share_a_number() -> None:
    assert len(set(CODES.values())) == len(CODES)


def test_every_code_of_run_is_in_the_documentation() -> None:
    text = (Path(__file__).parents[1] / "docs" / "torchrun.md").read_text()
    documented = set(re.findall(r"^\| (\d+)(?: \+ N)? \|", text, re.M))
    assert {str(code) for name, code in CODES.items() if name not in OF_OTHER_COMMANDS} <= documented
