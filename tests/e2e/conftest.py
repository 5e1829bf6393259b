"""Every test here has the leak guard."""

import pytest


@pytest.fixture(autouse=True)
def guarded(leak_guard: str) -> str:
    return leak_guard
