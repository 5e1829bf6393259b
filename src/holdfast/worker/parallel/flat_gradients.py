"""Gradients of all parameters: loose, as autograd leaves them, and flat, as few long stretches of memory to be sent.

A parameter that a slot does not use has no gradient there, which changes nothing that is added to it; where no slot had
one, no rank has one at the end, as without a reduction. In a flat gradient a missing one is −0.0, the one number that
changes nothing it is added to, not even the sign of a zero; and that it is missing is added up in the same sum:

    [ first parameter … last parameter | in how many parts each had a gradient | filled up to a whole piece a rank ]

There is one such stretch for each type and device.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from holdfast.errors import UsageError
from holdfast.torch_compat import add_all, copy_all

Loose = list[Tensor | None]
"""One for each parameter."""
PIECE_MULTIPLE = 16
"""Elements: so that the pieces of ranks begin where vector instructions like it."""


def take_gradients(parameters: Sequence[Tensor]) -> Loose:
    """Out of the parameters, which have none afterwards."""
    found: Loose = []
    for parameter in parameters:
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None and gradient.layout is not torch.strided:
            raise UsageError("sparse gradients cannot be reduced canonically: use sparse=False, or the usual reduction")
        found.append(gradient.detach() if gradient is not None and gradient.requires_grad else gradient)
    return found


def add(left: Loose, right: Loose) -> Loose:
    """Add the right gradients into the left ones."""
    both = [(mine, other) for mine, other in zip(left, right, strict=True) if mine is not None and other is not None]
    if both:
        add_all([mine for mine, _ in both], [other for _, other in both])
    return [other if mine is None else mine for mine, other in zip(left, right, strict=True)]


def give_gradients(parameters: Sequence[Tensor], gradients: Loose) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


class FlatRange:
    """Where the parameters of one type and device are in their stretch of memory."""

    def __init__(self, parameters: Sequence[Tensor], numbers: list[int], ranks: int) -> None:
        """`numbers` are those of its parameters among all of them."""
        self.numbers = numbers
        self._like = [parameters[number] for number in numbers]
        self._edges = [0]
        for parameter in self._like:
            self._edges.append(self._edges[-1] + parameter.numel())
        needed = self._edges[-1] + len(numbers)
        self.piece = -(-needed // (ranks * PIECE_MULTIPLE)) * PIECE_MULTIPLE
        self._length = self.piece * ranks

    def empty(self) -> Tensor:
        return torch.zeros(self._length, dtype=self._like[0].dtype, device=self._like[0].device)

    def pack(self, flat: Tensor, gradients: Loose) -> None:
        mine = [gradients[number] for number in self.numbers]
        views = self._views(flat)
        there = [(view, gradient) for view, gradient in zip(views, mine, strict=True) if gradient is not None]
        if there:
            copy_all([view for view, _ in there], [gradient for _, gradient in there])
        for view, gradient in zip(views, mine, strict=True):
            if gradient is None:
                view.fill_(-0.0)
        self._counts(flat).copy_(torch.tensor([float(gradient is not None) for gradient in mine], device="cpu"))

    def unpack(self, flat: Tensor) -> Loose:
        """Return the gradients, which stay in this memory."""
        counts = self._counts(flat).tolist()
        return [view if count else None for view, count in zip(self._views(flat), counts, strict=True)]

    def _views(self, flat: Tensor) -> list[Tensor]:
        cuts = zip(pairwise(self._edges), self._like, strict=True)
        return [flat[start:end].view(parameter.shape) for (start, end), parameter in cuts]

    def _counts(self, flat: Tensor) -> Tensor:
        return flat[self._edges[-1] : self._edges[-1] + len(self.numbers)]


class FlatLayout:
    """All parameters by type, and stretches of memory that are used again."""

    def __init__(self, parameters: list[Tensor], ranks: int) -> None:
        self.parameters, self.ranks = parameters, ranks
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for number, parameter in enumerate(parameters):
            kinds.setdefault((parameter.dtype, parameter.device), []).append(number)
        self.stretches = [FlatRange(parameters, numbers, ranks) for numbers in kinds.values()]
        self._free: dict[int, list[Tensor]] = {at: [] for at in range(len(self.stretches))}

    def fits(self, parameters: list[Tensor], ranks: int) -> bool:
        same = len(parameters) == len(self.parameters) and ranks == self.ranks
        return same and all(mine is other for mine, other in zip(self.parameters, parameters, strict=True))

    def borrow(self, at: int) -> Tensor:
        """Memory for the stretch with this number."""
        return self._free[at].pop() if self._free[at] else self.stretches[at].empty()

    def give_back(self, at: int, flats: Sequence[Tensor]) -> None:
        self._free[at] += flats
