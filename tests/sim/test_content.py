"""Page keys of simulated requests: equal where the workload says that the text is equal, and nowhere else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.errors import InvalidValueError
from equipoise.sim.content import Content
from equipoise.sim.workload.request import SimRequest

lens = st.integers(1, 300)


def keys(index: int, body: SimRequest, page_size: int, piece_len: int) -> list[bytes]:
    content = Content(page_size, piece_len, 1000, prefix_cache=True)
    return content.request(index, body, 0.0).page_keys


@given(st.sampled_from([1, 4, 16, 64]), st.sampled_from([1, 16, 24, 512]), lens, lens, st.integers(0, 20))
def test_pages_are_shared_up_to_the_last_that_lies_within_shared_pieces(
    page_size: int, piece_len: int, prompt_len: int, output_len: int, num_shared: int
) -> None:
    num_pieces = -(-(prompt_len + output_len) // piece_len)
    num_shared = min(num_shared, num_pieces)
    ours = tuple(range(num_pieces))
    theirs = ours[:num_shared] + tuple(range(100_000, 100_000 + num_pieces - num_shared))
    first = keys(1, SimRequest(0, prompt_len, output_len, ours), page_size, piece_len)
    second = keys(2, SimRequest(0, prompt_len, output_len, theirs), page_size, piece_len)
    assert len(first) == len(second) == (prompt_len + output_len) // page_size
    assert len(set(first)) == len(first)
    alike = [a == b for a, b in zip(first, second, strict=True)]
    assert alike == [(page + 1) * page_size <= num_shared * piece_len for page in range(len(first))]


@given(st.sampled_from([4, 16]), lens, lens)
def test_a_text_without_pieces_is_like_no_other(page_size: int, prompt_len: int, output_len: int) -> None:
    body = SimRequest(0, prompt_len, output_len)
    assert not set(keys(1, body, page_size, 512)) & set(keys(2, body, page_size, 512))


def test_requests_end_at_their_length_and_too_long_prompts_are_refused() -> None:
    content = Content(16, 512, 1000, prefix_cache=False)
    request = content.request(3, SimRequest(0, 100, 7), 2.5)
    assert (request.num_prompt, request.stop_len, request.arrival_s, request.page_keys) == (100, 107, 2.5, [])
    for prompt_len in (1000, 10_000_000):
        with pytest.raises(InvalidValueError, match="prompt: 1000 tokens"):
            content.request(4, SimRequest(0, prompt_len, 7), 0.0)


def test_an_output_beyond_the_model_takes_no_keys() -> None:
    content = Content(16, 512, 1000, prefix_cache=True)
    assert len(content.request(5, SimRequest(0, 100, 2**31), 0.0).page_keys) == 1000 // 16
