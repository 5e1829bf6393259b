"""The variables of a running function are seen, and not kept alive by that."""

from __future__ import annotations

import sys
import weakref

from holdfast.worker.frame_variables import variables_of


class Output:
    """As a model's."""


def test_what_a_variable_held_is_not_kept_alive() -> None:
    output = Output()
    alive = weakref.ref(output)
    seen = variables_of(sys._getframe())
    assert seen["output"] is output
    del output, seen
    assert alive() is None


def test_a_module_keeps_its_variables() -> None:
    namespace = {"sys": sys, "variables_of": variables_of}
    exec("found = variables_of(sys._getframe())\nkept = 1", namespace)
    assert namespace["kept"] == 1 and "sys" in namespace
