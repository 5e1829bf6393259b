"""Every test here has the leak guard, and compares with torchrun itself."""

import pytest

TIMEOUT_S = 400
"""Longer than elsewhere: a launch of torchrun imports torch in each process, many times what one of ours needs."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the tests of this directory the time that torchrun takes on a busy machine."""
    for item in items:
        if item.path.parent.name == "conformance":
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(autouse=True)
def guarded(leak_guard: str) -> str:
    return leak_guard
