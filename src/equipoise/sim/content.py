"""Requests for a scheduler out of requests of a workload: real page keys, and no tokens.

What a page holds is told by its key alone: the id of the piece that it ends in stands for all the text before, so
nothing is hashed, and prompts of any length share one array of zeros.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from equipoise.request import Request, SamplingParams

if TYPE_CHECKING:
    from equipoise.sim.workload.request import SimRequest

SHARED, OWN = 0, 1
KEY_BYTES = 24


class Content:
    """Makes requests whose prompts and outputs share pages as the workload's pieces say."""

    def __init__(self, page_size: int, piece_len: int, max_model_len: int, *, prefix_cache: bool) -> None:
        self._page_size = page_size
        self._piece_len = piece_len
        self._max_model_len = max_model_len
        self._prefix_cache = prefix_cache

    @cached_property
    def _zeros(self) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return np.zeros(self._max_model_len, np.int32)

    def request(self, index: int, body: SimRequest, arrival_s: float) -> Request:
        """`body` as the `index`-th request. Raises InvalidValueError when its prompt is too long."""
        params = SamplingParams(max_tokens=body.output_len, ignore_eos=True)
        # One past the longest is enough for the scheduler to see that it is too long.
        prompt = self._zeros[: body.prompt_len] if body.prompt_len < self._max_model_len else self._zeros
        request = Request(index, "", prompt, params, max_model_len=self._max_model_len, arrival_s=arrival_s)
        if self._prefix_cache:
            request.page_keys = self._keys(index, body)
        return request

    def _keys(self, index: int, body: SimRequest) -> list[bytes]:
        """Keys of all pages that prompt and output can fill."""
        page_size, piece_len, pieces = self._page_size, self._piece_len, body.pieces
        num_pages = min(body.prompt_len + body.output_len, self._max_model_len) // page_size
        num_shared = min(num_pages, len(pieces) * piece_len // page_size)
        # (kind, id of the piece that the page ends in or of the request, page)
        fields = np.empty((num_pages, 3), np.int64)
        fields[:, 0] = OWN
        fields[:, 1] = index
        fields[:, 2] = np.arange(num_pages)
        if num_shared:
            fields[:num_shared, 0] = SHARED
            ends = np.arange(page_size - 1, num_shared * page_size, page_size)
            fields[:num_shared, 1] = np.array(pieces)[ends // piece_len]
        packed = fields.tobytes()
        return [packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES)]
