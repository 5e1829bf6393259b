"""What of a tensor its pieces have, against a mask of every element."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from holdfast.storage.coverage import Box, Coverage


@st.composite
def tensors(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    bounds = [st.tuples(st.integers(0, size), st.integers(0, size)).map(sorted).map(tuple) for size in shape]
    return shape, draw(st.lists(st.tuples(*bounds), max_size=8))


def elements(box: Box) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(start, stop) for start, stop in box)))


@given(tensors())
def test_each_element_is_taken_once_or_missing(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = case
    coverage, taken = Coverage(shape), list[tuple[int, ...]]()
    for box in boxes:
        first = coverage.add([start for start, _ in box], [stop - start for start, stop in box])
        new = [element for part in first for element in elements(part)]
        assert set(new) <= set(elements(box))
        taken += new
    missing = [element for box in coverage.missing for element in elements(box)]
    everything = elements(tuple((0, size) for size in shape))
    assert sorted(taken + missing) == everything
    assert sorted(taken) == sorted({element for box in boxes for element in elements(box)})
    assert bool(missing) == bool(coverage.describe_missing())


def test_missing_rows_and_columns_are_named() -> None:
    coverage = Coverage((10, 6))
    coverage.add((0, 0), (8, 6))
    assert coverage.describe_missing() == "rows 8 to 9 of 10"
    coverage.add((8, 0), (1, 3))
    assert coverage.describe_missing() == "row 8 of 10 at [3:6], row 9 of 10"


def test_a_tensor_without_dimensions_is_there_or_not() -> None:
    coverage = Coverage(())
    assert coverage.describe_missing() == "its value"
    assert coverage.add((), ()) == [()]
    assert not coverage.missing
