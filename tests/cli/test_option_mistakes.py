"""A mistake in the options of a command: what was given, and what to give, in our words and not in a library's."""

from __future__ import annotations

import pytest

from holdfast.cli.main import main

MISTAKES = {
    "logs --tail x": "--tail x: give a whole number; holdfast logs --help says what there is",
    "logs --rank 0.5": "--rank 0.5: give a whole number; holdfast logs --help says what there is",
    "jobs -n -3": "--number -3: give 0 or more; holdfast jobs --help says what there is",
    "resize 99999999999": "NODES 99999999999: give at most",
    "plan x": "BYTES x: give a number; holdfast plan --help says what there is",
    "checkpoints rm /tmp x": "STEP x: give a whole number; holdfast checkpoints rm --help says what there is",
    "status -o xml": "--output xml: give text or json; holdfast status --help says what there is",
    "init --template hf": "--template hf: give ddp, fsdp2 or huggingface; holdfast init --help says what there is",
    "plan 1e9 --step abc": "--step abc: give a number; holdfast plan --help says what there is",
    "drain": "Missing argument 'NODE'; holdfast drain --help says what there is",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_names_the_option_what_was_given_and_what_to_give(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        main(words.split())
    assert refused.value.code == 2
    assert capsys.readouterr().err.startswith(f"holdfast: {MISTAKES[words]}")
