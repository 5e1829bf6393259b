"""Token streams for language models: a memory-mapped file of token numbers, split into windows of fixed length.

Sample k is the tokens k·L … k·L + L − 1 as inputs and the same shifted by one as targets. The last, incomplete window
is left out, as is usual; it is the same at every resume. The file is mapped, not read: opening costs nothing, and
workers share the pages.

**Documents in a window.** With `separator`, the token that ends each document, a window also has

    documents   the number of each token's document within the window, from 0: attend only where they are equal
    positions   the place of each token in its document, from 0 at the window's or the document's beginning

so that packed documents do not see one another. The separator belongs to the document it ends, and the target of a
separator is IGNORED: no document predicts the next one's first token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch.utils.data import Dataset

from holdfast.errors import UsageError

IGNORED = -100
"""The target that torch's cross_entropy passes over."""


class TokenFile(Dataset[dict[str, torch.Tensor]]):
    """A map-style dataset of windows of a flat file of tokens, for hf.Sampler, hf.Loader or any other."""

    def __init__(
        self, path: str | Path, *, window_tokens: int, dtype: DTypeLike = np.uint16, separator: int | None = None
    ) -> None:
        self.path, self.window_tokens, self.separator = Path(path), window_tokens, separator
        self.dtype = np.dtype(dtype)
        if window_tokens < 1:
            raise UsageError(f"windows of {window_tokens} tokens are not possible; give at least 1")
        if not self.path.is_file():
            raise UsageError(f"{self.path} is not a file")
        size_bytes = self.path.stat().st_size
        if self.dtype.kind not in "iu" or size_bytes % self.dtype.itemsize:
            raise UsageError(f"{self.path} has {size_bytes:,} bytes, which are not whole tokens of type {self.dtype}")
        self.tokens_total = size_bytes // self.dtype.itemsize
        if not len(self):
            raise UsageError(f"{self.path} has {self.tokens_total:,} tokens, too few for a window and its targets")
        self._tokens: NDArray[Any] | None = None

    def __len__(self) -> int:
        return max(0, self.tokens_total - 1) // self.window_tokens

    def __getitem__(self, sample: int) -> dict[str, torch.Tensor]:
        if not 0 <= sample < len(self):
            raise IndexError(f"window {sample} of {len(self)}")
        first = sample * self.window_tokens
        tokens = self._mapped()[first : first + self.window_tokens + 1].astype(np.int64)
        inputs, targets = tokens[:-1], tokens[1:].copy()
        window = {"inputs": inputs, "targets": targets}
        if self.separator is not None:
            ends = inputs == self.separator
            targets[ends] = IGNORED
            window |= pack(ends)
        return {name: torch.from_numpy(values) for name, values in window.items()}

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the mapping: workers map the file themselves."""
        return self.__dict__ | {"_tokens": None}

    def _mapped(self) -> NDArray[Any]:
        if self._tokens is None:
            self._tokens = np.memmap(self.path, dtype=self.dtype, mode="r")
        return self._tokens


def pack(ends: NDArray[np.bool_]) -> dict[str, NDArray[np.int64]]:
    """Return documents and positions of a window's tokens, given where documents end."""
    starts = np.concatenate(([True], ends[:-1]))
    documents = np.cumsum(starts) - 1
    places = np.arange(len(ends))
    return {"documents": documents, "positions": places - places[starts][documents]}
