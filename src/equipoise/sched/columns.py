"""The hot state of seated requests, one numpy row per seat: the one truth that scheduler and executor share.

Token ranges of a seated request (half-open, all in positions of its sequence):

    [0, computed)        KV computed, or will be by a step that is outstanding
    [0, known)           token values known on the host (`tokens[seat, :known]`)
    [known, length)      outputs in flight: drawn by steps that are outstanding
    [0, capacity)        positions that have a page
    stop_len             the request ends, at the latest, when length reaches it
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from equipoise.request import Request, Tokens

ONE = np.array(1)
"""As an operand half the price of the integer, which numpy converts anew in every operation (0.25 us)."""

TOKENS_PER_CACHE_LINE = 16

STOP_IDS_WIDTH = 8
"""Stop token ids per seat checked in one vector operation; a request with more is checked row by row."""


class Columns:
    """Numpy columns indexed by seat. A free seat has `handle` -1.

    computed, known, length, stop_len, capacity, handle: (num_seats,) int64
    page_mask: () int64; `position & page_mask` is the offset in a page, whose size is a power of two
    page_table: (num_seats, max_pages) int32, entry i holds the page of positions [i*page_size, (i+1)*page_size)
    tokens: (num_seats, width) int32; width grows with the longest request seated so far, so take a
            fresh reference each step
    stop_ids: (STOP_IDS_WIDTH, num_seats) int32, -1 where unused; no seat uses more than the first `stop_width` rows
    """

    def __init__(self, num_seats: int, max_model_len: int, page_size: int) -> None:
        self.num_seats = num_seats
        self.max_model_len = max_model_len
        self.page_size = page_size
        self.page_mask = np.array(page_size - 1)
        self.computed = np.zeros(num_seats, np.int64)
        self.known = np.zeros(num_seats, np.int64)
        self.length = np.zeros(num_seats, np.int64)
        self.stop_len = np.zeros(num_seats, np.int64)
        self.capacity = np.zeros(num_seats, np.int64)
        self.handle = np.full(num_seats, -1, np.int64)
        self.stop_ids = np.full((STOP_IDS_WIDTH, num_seats), -1, np.int32)
        self.stop_width = 0
        self.page_table = np.zeros((num_seats, -(-max_model_len // page_size)), np.int32)
        self.tokens = _token_rows(num_seats, min(max_model_len, 1024))

    def seat(self, request: Request, seat: int) -> None:
        """Write `request` into a free `seat`: its known tokens, pages and lengths."""
        num_prompt, num_known = request.num_prompt, request.num_known
        self._widen(request.stop_len)
        row = self.tokens[seat]
        row[:num_prompt] = request.prompt_ids
        row[num_prompt:num_known] = request.output_ids
        self.computed[seat] = request.num_computed
        self.known[seat] = self.length[seat] = num_known
        self.stop_len[seat] = request.stop_len
        self.handle[seat] = request.handle
        self._write_stop_ids(request, seat)
        self.capacity[seat] = 0
        self.write_pages(request, seat)
        request.seat = seat

    def write_pages(self, request: Request, seat: int) -> None:
        """Copy the pages that `request` gained since the last call into its page table row."""
        start = int(self.capacity[seat]) // self.page_size
        pages = request.pages
        self.page_table[seat, start : len(pages)] = pages[start:]
        self.capacity[seat] = len(pages) * self.page_size

    def add_pages(self, seats: NDArray[np.int64], pages: list[int]) -> None:
        """Each of `seats`, (n,), gained one page, in that order."""
        capacity = self.capacity[seats]
        self.page_table[seats, capacity // self.page_size] = pages
        self.capacity[seats] = capacity + self.page_size

    def last_page_tokens(self, seats: NDArray[np.int64], ends: NDArray[np.int64]) -> Tokens:
        """(n, page_size) tokens of the pages that end with position `ends`, (n,), of `seats`, (n,)."""
        tokens: Tokens = self.tokens[seats[:, None], ends[:, None] + np.arange(1 - self.page_size, 1)]
        return tokens

    def unseat(self, request: Request, seat: int) -> None:
        """Free `seat`; the outputs known so far go back into `request.output_ids`."""
        self.read_outputs(request, seat)
        self.handle[seat] = -1
        request.seat = None

    def read_outputs(self, request: Request, seat: int) -> None:
        """Bring `request.output_ids` and `num_computed` up to date with the seat."""
        request.num_computed = int(self.computed[seat])
        have = request.num_known
        known = int(self.known[seat])
        if known > have:
            request.output_ids.extend(self.tokens[seat, have:known].tolist())

    def _write_stop_ids(self, request: Request, seat: int) -> None:
        first = request.stop_ids[:STOP_IDS_WIDTH]
        self.stop_width = max(self.stop_width, len(first))
        self.stop_ids[: self.stop_width, seat] = -1
        self.stop_ids[: len(first), seat] = first

    def _widen(self, stop_len: int) -> None:
        width = self.tokens.shape[1]
        if stop_len <= width:
            return
        wider = _token_rows(self.num_seats, min(self.max_model_len, max(stop_len, 2 * width)))
        seated = self.handle >= 0  # rows that nobody uses stay untouched: they take no memory
        wider[seated, :width] = self.tokens[seated]
        self.tokens = wider


def _token_rows(num_seats: int, width: int) -> Tokens:
    """(num_seats, width) zeros. Rows start an odd number of cache lines apart: a power of two would map one
    position of every row to the same few lines, and a step's scatter of 1,024 tokens takes twice the time."""
    num_lines = -(-width // TOKENS_PER_CACHE_LINE) | 1
    return np.zeros((num_seats, num_lines * TOKENS_PER_CACHE_LINE), np.int32)[:, :width]
