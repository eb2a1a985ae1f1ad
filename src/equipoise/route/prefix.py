"""Who has seen which prefix: keys of growing prefixes, and a bounded approximate index of them.

A worker keeps the KV of prompts that it computed, so a prompt that begins alike is cheaper there. The index
guesses what a worker holds from what was routed to it. It may be wrong: the worker may have evicted a prefix, and
a key is 32 bits of CRC. A wrong guess costs a prefill, never a wrong answer.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING
from zlib import crc32

if TYPE_CHECKING:
    from collections.abc import Sequence

STEPS = ((4096, 256), (65536, 1024), (1 << 20, 8192))
"""(up to, step), bytes: prefixes get a key every 256 bytes up to 4 KB, then every KB, then every 8 KB up to 1 MB.
76 keys for 64 KB; a match is at most a fifth shorter than what is shared, and a sixteenth from 4 KB on."""

ENDS = tuple(
    end
    for (start, _), (upto, step) in zip(((0, 0), *STEPS), STEPS, strict=False)
    for end in range(start + step, upto + 1, step)
)
"""Bytes that the prefix of each key has."""

MIN_KEY_BYTES = ENDS[0]
"""Shorter prompts have no key."""

MAX_KEYS = 131_072
"""About 12 MB."""

MAX_LEFT = 64


def prefix_keys(data: bytes | memoryview, salt: int = 0) -> list[int]:
    """Keys of growing prefixes of `data`, the shortest first; what is left after the last step has none.

    Equal prefixes have equal keys in every process. `salt`: of what must not be mixed, as models."""
    num_bytes = len(data)
    keys: list[int] = []
    if num_bytes < MIN_KEY_BYTES:
        return keys
    view = memoryview(data)
    key, start = salt, 0
    for upto, step in STEPS:
        last = min(upto, num_bytes)
        for end in range(start + step, last + 1, step):
            key = crc32(view[end - step : end], key)
            keys.append(key)
        if num_bytes < upto:
            break
        start = upto
    return keys


def matched_share(num_matched: int, num_keys: int) -> float:
    """Share of a prompt of `num_keys` keys that its first `num_matched` cover."""
    return ENDS[num_matched - 1] / ENDS[num_keys - 1] if num_matched else 0.0


class PrefixMap:
    """Which workers have seen which prefixes lately; at most `max_keys` of them.

    A prefix is a key and a bit per worker, in one of two generations: what is seen goes into the young one; when
    that is full it becomes the old one, and what was old is forgotten. So each (prefix, worker) is remembered for
    between a half and all of the last `max_keys` insertions, whatever else is hot, and nothing is ever moved."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        """Raises ValueError when `max_keys` is below 2."""
        if max_keys < 2:
            raise ValueError(f"max_keys is {max_keys}, it must be at least 2")
        self._max_young = max_keys // 2
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}
        self._young_sizes: Counter[str] = Counter()
        self._old_sizes: Counter[str] = Counter()
        self._bit_of: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._present = 0
        self._free_bits: list[int] = []
        self._left_young: list[int] = []
        self._left_old: list[int] = []

    def __len__(self) -> int:
        """Keys held, those in both generations twice: what memory they take."""
        return len(self._young) + len(self._old)

    def num_keys(self, worker: str) -> int:
        """Keys that `worker` has in the index, those in both generations twice."""
        return self._young_sizes[worker] + self._old_sizes[worker]

    def match(self, keys: Sequence[int]) -> dict[str, int]:
        """How many of the first `keys` each worker has seen; workers that saw none are left out."""
        depths: dict[str, int] = {}
        young, old = self._young, self._old
        holders = self._present
        depth = 0
        for key in keys:
            still = (young.get(key, 0) | old.get(key, 0)) & holders
            if still != holders:
                if depth:
                    self._note(depths, holders & ~still, depth)
                holders = still
                if not still:
                    return depths
            depth += 1
        if depth:
            self._note(depths, holders, depth)
        return depths

    def add(self, keys: Sequence[int], worker: str) -> None:
        """`worker` sees a prompt with these `keys`."""
        if len(keys) > self._max_young:
            keys = keys[: self._max_young]
        if len(self._young) + len(keys) > self._max_young:
            self._turn()
        bit = self._bit_of.get(worker) or self._join(worker)
        young = self._young
        num_new = 0
        for key in keys:
            holders = young.get(key, 0)
            if not holders & bit:
                young[key] = holders | bit
                num_new += 1
        self._young_sizes[worker] += num_new

    def remove(self, worker: str) -> None:
        """`worker` left or lost its cache. O(1): its bit is ignored, and used anew when no entry can have it."""
        bit = self._bit_of.pop(worker, None)
        if bit is None:
            return
        self._present &= ~bit
        del self._names[bit]
        del self._young_sizes[worker], self._old_sizes[worker]
        self._left_young.append(bit)
        if self._num_left() > MAX_LEFT:  # else churn without traffic would widen the bits
            self._turn()
            self._turn()

    def _join(self, worker: str) -> int:
        bit = self._free_bits.pop() if self._free_bits else 1 << (len(self._names) + self._num_left())
        self._bit_of[worker] = bit
        self._names[bit] = worker
        self._present |= bit
        return bit

    def _num_left(self) -> int:
        return len(self._left_young) + len(self._left_old)

    def _note(self, depths: dict[str, int], bits: int, depth: int) -> None:
        """The workers of `bits` have seen `depth` keys."""
        names = self._names
        while bits:
            bit = bits & -bits
            depths[names[bit]] = depth
            bits ^= bit

    def _turn(self) -> None:
        """The young generation becomes the old one. Bits of workers that left before the last turn are free."""
        self._old, self._young = self._young, {}
        self._old_sizes, self._young_sizes = self._young_sizes, Counter()
        self._free_bits += self._left_old
        self._left_old, self._left_young = self._left_young, []
