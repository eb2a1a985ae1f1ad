"""Tokens as answers tell them."""

from __future__ import annotations

import pytest

from equipoise.gateway.relay.usage import read_usage


@pytest.mark.parametrize(
    ("tail", "usage"),
    [
        (b'{"usage":{"prompt_tokens":8,"completion_tokens":6,"total_tokens":14}}', (8, 6, 0)),
        (b'{"usage" : { "prompt_tokens" : 8 ,\n "completion_tokens" : 6 } }', (8, 6, 0)),
        (b'{"meta_info":{"prompt_tokens":8,"completion_tokens":6,"cached_tokens":5}}', (8, 6, 5)),
        (b'{"usage":{"prompt_tokens":8,"completion_tokens":6,"prompt_tokens_details":{"cached_tokens":8}}}', (8, 6, 8)),
        (b'{"usage":{"prompt_tokens_details":{"cached_tokens":4},"prompt_tokens":8}}', (8, None, 4)),
        (b'{"usage":{"input_tokens":8,"input_tokens_details":{"cached_tokens":3},"output_tokens":6}}', (8, 6, 3)),
        (b'{"usage":{"input_tokens":8,"output_tokens":6,"output_tokens_details":{"reasoning_tokens":1}}}', (8, 6, 0)),
        (b'{"usage":{"prompt_tokens":8,"completion_tokens":6,"completion_tokens_details":null}}', (8, 6, 0)),
        (b'data: {"completion_tokens":1}\n\ndata: {"completion_tokens":2,"prompt_tokens":9}\n\n', (9, 2, 0)),
        (b'{"usage":{"prompt_tokens":8,"total_tokens":8}}', (8, None, 0)),
        (b'{"usage":null}', (0, None, 0)),
        (b'{"completion_tokens":null,"prompt_tokens":"8"}', (0, None, 0)),
        (b'{"text":"\\"completion_tokens\\" are"}', (0, None, 0)),
        (b'{"completion_tokens":-1}', (0, None, 0)),
        (b'{"completion_tokens"', (0, None, 0)),
        (b"", (0, None, 0)),
        (b'{"prompt_tokens":100000000,"completion_tokens":100000000}', (100_000_000, 100_000_000, 0)),
        (b'{"prompt_tokens":100000001,"completion_tokens":100000001}', (0, None, 0)),
        (b'{"prompt_tokens":8,"completion_tokens":999999999999}', (8, None, 0)),
        (b'{"completion_tokens":99999999999999999999}', (0, None, 0)),
        (b'{"prompt_tokens":8,"cached_tokens":9}', (8, None, 0)),
        (b'{"cached_tokens":9}', (0, None, 0)),
    ],
)
def test_usage_is_read_from_the_tail(tail: bytes, usage: tuple[int, int | None, int]) -> None:
    assert read_usage(tail) == usage
