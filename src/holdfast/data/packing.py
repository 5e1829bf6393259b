"""Documents packed into windows, inside a slot: for language models on documents of any length.

    data = hf.Loader(documents, global_batch_size=1024, slots=64, collate_fn=Packing(window_tokens=2048))
    for batch in step.batches(data, weight=targets_of):
        step.backward(cross_entropy(model(batch), batch["targets"].flatten()))

A slot's documents become as few windows as first-fit finds, the longest first. That depends on the slot alone, so that
it is the same at every world size and every resume; a packing across slots could not be. Without `slots=` a batch is a
rank's whole share, and its packing is another one at another world size.

Each document ends with its last token: nothing is predicted from it, and nothing across documents. One that is longer
than a window is split into sequences, of which each begins with the token the one before was to predict last. A window
has

    inputs      tokens, and `padding` behind them
    targets     the next token of the document; IGNORED where there is none
    documents   the number of each token's document within the window, from 0; −1 for padding. Attend where equal
    positions   the place of each token in its sequence of a document, from 0

Slots have different numbers of tokens, so their losses want weights (`targets_of`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from holdfast.data.token_files import IGNORED
from holdfast.errors import UsageError

NO_DOCUMENT = -1


class Packing:
    """A `collate_fn` that packs sequences of token numbers into windows, `[windows, window_tokens]` each."""

    def __init__(self, *, window_tokens: int, padding: int = 0) -> None:
        if window_tokens < 1:
            raise UsageError(f"windows of {window_tokens} tokens are not possible; give at least 1")
        self.window_tokens, self.padding = window_tokens, padding

    def __call__(self, documents: Sequence[Any]) -> dict[str, torch.Tensor]:
        windows = self._fitted([sequence for document in documents for sequence in self._sequences(document)]) or [[]]
        shape = (len(windows), self.window_tokens)
        batch = {
            "inputs": torch.full(shape, self.padding, device="cpu"),
            "targets": torch.full(shape, IGNORED, device="cpu"),
            "documents": torch.full(shape, NO_DOCUMENT, device="cpu"),
            "positions": torch.zeros(shape, dtype=torch.int64, device="cpu"),
        }
        for row, window in enumerate(windows):
            self._fill({name: values[row] for name, values in batch.items()}, window)
        return batch

    def _sequences(self, document: Any) -> list[torch.Tensor]:
        """Return the sequences that a document is split into, each with the target of its last input."""
        tokens = torch.as_tensor(document, dtype=torch.int64, device="cpu")
        return [tokens[at : at + self.window_tokens + 1] for at in range(0, len(tokens) - 1, self.window_tokens)]

    def _fitted(self, sequences: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Return the windows by first fit, the longest first; equal ones in their order."""
        windows: list[list[torch.Tensor]] = []
        space: list[int] = []
        for sequence in sorted(sequences, key=len, reverse=True):
            inputs = len(sequence) - 1
            window = next((at for at, free in enumerate(space) if free >= inputs), len(windows))
            if window == len(windows):
                windows.append([])
                space.append(self.window_tokens)
            windows[window].append(sequence)
            space[window] -= inputs
        return windows

    def _fill(self, row: dict[str, torch.Tensor], window: list[torch.Tensor]) -> None:
        begin = 0
        for number, sequence in enumerate(window):
            end = begin + len(sequence) - 1
            row["inputs"][begin:end], row["targets"][begin:end] = sequence[:-1], sequence[1:]
            row["documents"][begin:end] = number
            row["positions"][begin:end] = torch.arange(end - begin, device="cpu")
            begin = end


def targets_of(batch: dict[str, torch.Tensor]) -> int:
    """Return how many tokens a batch predicts: its weight in the mean over the global batch."""
    return int((batch["targets"] != IGNORED).sum())
