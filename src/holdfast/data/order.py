"""The order of samples as a pure function: position → epoch, offset → sample.

A shuffled epoch is a permutation of 0 … size − 1. Writing it down costs memory and time that grow with the dataset
(8 TB for 10^12 samples), and finding the place again after a fault costs as much. So it is computed instead:

1. **Feistel.** The smallest domain of 2^(2h) numbers that holds the size is split into two halves of h bits. Each of
the
   ROUNDS rounds maps (left, right) to (right, left XOR f(right, key)). Whatever f is, every round can be undone, so the
   whole is a bijection of the domain. f is a 64-bit multiply-and-shift mixer of which the upper h bits are kept.
2. **Cycle-walking.** A result outside the dataset is permuted again until it falls inside. Following the cycles of a
   bijection from a point inside, the first point inside is again a bijection, now of exactly 0 … size − 1: no padding,
   no dropping. The domain is less than four times the size (64 at least), so fewer than four walks are expected.
3. **Keys.** The round keys of an epoch are a BLAKE2b hash of (seed, epoch, purpose). Equal on every machine and in
   every version: tests hold golden values.

It is a shuffle, not a cipher: it keeps no secrets.

**Locality.** Storage that is fast only when read in sequence wants neighbours in time to be neighbours on disk. With
`Locality(shard_samples, window_shards)` the order of the shards is permuted, and then each window of that many
shards is shuffled as one. Only a window's shards are open at a time. If the last shard of the dataset is short, its
window is short, and later windows begin that much earlier; within its window it is counted last. Still a bijection.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from holdfast.errors import UsageError

Indices = NDArray[np.int64]
Words = NDArray[np.uint64]

ROUNDS = 8
"""Six are the least for large domains; with eight, small ones (a dozen samples) pass the tests of uniformity too."""
HALF_BITS_MIN = 3
"""With halves of one or two bits there are too few round functions: some permutations of five come up too often."""
SIZE_MAX = 2**62
"""Positions within an epoch, doubled by the domain's rounding up, must fit 64 bits."""
KEYS_CACHED_MAX = 64

_STRIDE = np.uint64(0x9E3779B97F4A7C15)
_FIRST_FACTOR = np.uint64(0xBF58476D1CE4E5B9)
_SECOND_FACTOR = np.uint64(0x94D049BB133111EB)
_HALF_WORD = np.uint64(32)


@lru_cache(maxsize=KEYS_CACHED_MAX)
def round_keys(seed: int, epoch: int, purpose: str) -> tuple[int, ...]:
    """Return the keys of one permutation."""
    text = f"holdfast order 1\0{seed}\0{epoch}\0{purpose}".encode()
    digest = hashlib.blake2b(text, digest_size=8 * ROUNDS).digest()
    return tuple(int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(ROUNDS))


@dataclass(frozen=True)
class Permutation:
    """A keyed bijection of 0 … size − 1. A tweak selects another bijection, element by element."""

    size: int
    keys: tuple[int, ...]

    @cached_property
    def half_bits(self) -> int:
        return max(HALF_BITS_MIN, ((self.size - 1).bit_length() + 1) // 2)

    def apply(self, values: Indices, tweak: Indices | None = None) -> Indices:
        """Return the images of these values, all of which are below the size."""
        tweaks = None if tweak is None else tweak.astype(np.uint64)
        return self._walk(values.astype(np.uint64), tweaks, self.keys, swapped=False).astype(np.int64)

    def invert(self, value: int) -> int:
        """Return the value whose image this is."""
        image = np.array([value], dtype=np.uint64)
        return int(self._walk(image, None, self.keys[::-1], swapped=True)[0])

    def _walk(self, values: Words, tweaks: Words | None, keys: tuple[int, ...], swapped: bool) -> Words:
        result = self._rounds(values, tweaks, keys, swapped)
        outside = np.flatnonzero(result >= self.size)
        while outside.size:
            moved = self._rounds(result[outside], None if tweaks is None else tweaks[outside], keys, swapped)
            result[outside] = moved
            outside = outside[moved >= self.size]
        return result

    def _rounds(self, values: Words, tweaks: Words | None, keys: tuple[int, ...], swapped: bool) -> Words:
        bits, mask = np.uint64(self.half_bits), np.uint64((1 << self.half_bits) - 1)
        left, right = values >> bits, values & mask
        if swapped:
            left, right = right, left
        spread = None if tweaks is None else tweaks * _STRIDE
        for key in keys:
            mixed = right + np.uint64(key)
            if spread is not None:
                mixed ^= spread
            left ^= _mix(mixed) >> np.uint64(64 - self.half_bits)
            left, right = right, left
        if swapped:
            left, right = right, left
        return (left << bits) | right


def _mix(words: Words) -> Words:
    """Mix in place, such that every input bit reaches every upper output bit."""
    words *= _FIRST_FACTOR
    words ^= words >> _HALF_WORD
    words *= _SECOND_FACTOR
    return words


@dataclass(frozen=True)
class Locality:
    """A setting that shuffles the shards, then the samples of each window of shards."""

    shard_samples: int
    window_shards: int = 16

    def __post_init__(self) -> None:
        if self.shard_samples < 1 or self.window_shards < 1:
            raise UsageError("a locality needs shards of at least one sample and a window of at least one shard")


@dataclass(frozen=True)
class Order:
    """The map from positions to samples. Positions count on from epoch to epoch."""

    size: int
    seed: int = 0
    shuffle: bool = True
    locality: Locality | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.size < SIZE_MAX:
            raise UsageError(f"the dataset has {self.size:,} samples; an order needs 1 to {SIZE_MAX - 1:,}")

    def place(self, position: int) -> tuple[int, int]:
        """Return the epoch of a position and the offset in it."""
        return divmod(position, self.size)

    def samples_at(self, positions: range) -> Indices:
        """Return the samples at consecutive positions, which may cross the ends of epochs."""
        found = [self.samples_of(epoch, np.arange(a, b)) for epoch, a, b in self.segments(positions)]
        return np.concatenate(found) if found else np.empty(0, dtype=np.int64)

    def segments(self, positions: range) -> list[tuple[int, int, int]]:
        """Yield the same positions as (epoch, first offset, end offset)."""
        segments = []
        position = positions.start
        while position < positions.stop:
            epoch, offset = self.place(position)
            end = min(self.size, offset + positions.stop - position)
            segments.append((epoch, offset, end))
            position += end - offset
        return segments

    def samples_of(self, epoch: int, offsets: Indices) -> Indices:
        """Return the samples at offsets of one epoch, in any order."""
        if not self.shuffle:
            return offsets.astype(np.int64)
        if self.locality is None:
            return Permutation(self.size, round_keys(self.seed, epoch, "samples")).apply(offsets)
        return _WindowedEpoch(self.size, self.seed, epoch, self.locality).samples_of(offsets)


@dataclass(frozen=True)
class _WindowedEpoch:
    """One epoch of an order with locality."""

    size: int
    seed: int
    epoch: int
    locality: Locality

    @cached_property
    def shards(self) -> int:
        return -(-self.size // self.locality.shard_samples)

    @cached_property
    def shard_order(self) -> Permutation:
        return Permutation(self.shards, round_keys(self.seed, self.epoch, "shards"))

    def samples_of(self, offsets: Indices) -> Indices:
        """Return the samples, window size by window size: at most three sizes occur (full, with the short shard,
        last)."""
        samples = self.locality.shard_samples
        full = samples * self.locality.window_shards
        short_place = self.shard_order.invert(self.shards - 1)
        short_window = short_place // self.locality.window_shards
        missing = self.shards * samples - self.size
        late = offsets >= (short_window + 1) * full - missing
        windows = (offsets + np.where(late, missing, 0)) // full
        inside = offsets - windows * full + np.where(windows > short_window, missing, 0)
        result = np.empty_like(offsets)
        for window_size, members in self._by_size(windows, short_window, missing):
            keys = round_keys(self.seed, self.epoch, "window")
            local = Permutation(window_size, keys).apply(inside[members], windows[members])
            result[members] = self._locate(windows[members], local, short_place)
        return result

    def _by_size(self, windows: Indices, short_window: int, missing: int) -> list[tuple[int, Indices]]:
        per_window = self.locality.window_shards
        shards = np.minimum(per_window, self.shards - windows * per_window)
        sizes = shards * self.locality.shard_samples - np.where(windows == short_window, missing, 0)
        return [(int(size), np.flatnonzero(sizes == size)) for size in np.unique(sizes)]

    def _locate(self, windows: Indices, local: Indices, short_place: int) -> Indices:
        """Return the sample of a place within a window. The short shard counts as its window's last."""
        samples, per_window = self.locality.shard_samples, self.locality.window_shards
        places = windows * per_window + local // samples
        window_end = np.minimum((windows + 1) * per_window, self.shards)
        same = windows == short_place // per_window
        after = np.where(same & (places >= short_place), places + 1, places)
        places = np.where(same & (after == window_end), short_place, after)
        return self.shard_order.apply(places) * samples + local % samples
