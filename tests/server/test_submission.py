"""Prompts as token arrays, and a request per choice."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from equipoise.errors import InvalidValueError
from equipoise.request import SamplingParams
from equipoise.server.submission import split_choices, token_array


@pytest.mark.parametrize("prompt", ["ab", [1.5], [[1]], [[1], 2], ["a"], 3, [True], {1: 2}])
def test_token_array_refuses(prompt: Any) -> None:
    with pytest.raises(InvalidValueError, match="list of token ids"):
        token_array(prompt)


def test_token_array() -> None:
    assert token_array([]).tolist() == []
    array = token_array([3, 2**31, -5, 2**31 - 1])
    assert array.dtype == np.int32
    assert array.tolist() == [3, -1, -1, 2**31 - 1]


def test_split_choices() -> None:
    params = SamplingParams(n=3, seed=5)
    assert [(choice.n, choice.seed) for choice in split_choices(params)] == [(1, 5), (1, 6), (1, 7)]
    assert split_choices(SamplingParams()) == [SamplingParams()]
    highest = msgspec.structs.replace(params, seed=2**63 - 1)
    assert [choice.seed for choice in split_choices(highest)][1] == -(2**63)
    for choice in split_choices(highest):
        choice.check(10)
