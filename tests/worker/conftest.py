"""The fork server that the tests of a module share."""

from collections.abc import Iterator

import pytest

from support.nest import Nest


@pytest.fixture(scope="module")
def warm() -> Iterator[Nest]:
    with Nest("warm") as nest:
        yield nest
