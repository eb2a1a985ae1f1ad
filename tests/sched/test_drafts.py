"""The n-gram drafter: what it proposes from a request's own text."""

from __future__ import annotations

import numpy as np
import pytest
from tests.sched.rig import Rig, make_request

from equipoise.request import Grammar
from equipoise.sched.drafts import NgramDrafter


@pytest.mark.parametrize(
    ("tokens", "most", "expected"),
    [
        ([1, 2, 3, 4, 1, 2], 9, [3, 4, 1]),
        ([1, 2, 3, 4, 1, 2], 2, [3, 4]),
        ([1, 2, 3, 4, 1, 2], 0, []),
        ([1, 2, 3, 9, 2], 9, []),  # one token is no match
        ([1, 2, 5, 1, 2, 6, 1, 2], 1, [6]),  # the last place of several
        ([7, 1, 2, 5, 1, 2, 6, 7, 1, 2], 1, [5]),  # the longer match goes first
        ([4, 4, 4], 9, [4]),
        ([1, 2], 9, []),
        ([1], 9, []),
    ],
)
def test_what_followed_the_last_tokens_before_is_proposed(tokens, most, expected):
    assert NgramDrafter(3).propose(make_request(), np.array(tokens, np.int32), most) == expected


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, True),
        ({"repetition_penalty": 1.1}, False),
        ({"presence_penalty": 0.5}, False),
        ({"frequency_penalty": -0.5}, False),
        ({"grammar": Grammar("regex", "a")}, False),
    ],
)
def test_draws_that_hang_on_those_before_them_have_no_drafts(params, expected):
    assert NgramDrafter(3).drafts_for(make_request(**params)) == expected


def test_drafts_that_come_true_save_steps():
    rig = Rig(num_drafts=3)
    rig.add("a", [1, 2, 3, 4, 1], max_tokens=6)
    rig.step(a=2)
    assert rig.plan() == [("a", 4)]  # its last token, and three drafts
    assert rig.last.verifies[0].drafts == [3, 4, 1]
