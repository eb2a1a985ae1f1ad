"""Pages by age, against an ordered dictionary."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.errors import PageError
from equipoise.kv.recent import MIN_LEFT_OVER, RecentPages

NUM_PAGES = 30
moves = st.one_of(
    st.lists(st.integers(0, NUM_PAGES - 1), unique=True).map(lambda pages: ("add", pages)),
    st.lists(st.integers(0, NUM_PAGES - 1), unique=True, max_size=5).map(lambda pages: ("remove", pages)),
    st.integers(0, 10).map(lambda n: ("pop", [n])),
)


@given(st.lists(moves, max_size=40))
def test_pages_leave_in_the_order_in_which_they_came_last(drawn):
    recent, model = RecentPages(), OrderedDict()
    for name, numbers in drawn:
        if name == "add":
            new = [page for page in numbers if page not in model]
            recent.add(new)
            model.update(dict.fromkeys(new))
        elif name == "remove":
            for page in numbers:
                if page in model:
                    recent.remove(page)
                    del model[page]
        else:
            n = min(numbers[0], len(model))
            assert recent.pop(n) == [model.popitem(last=False)[0] for _ in range(n)]
        assert list(recent) == list(model)
        assert len(recent) == len(model)
        assert [page in recent for page in range(NUM_PAGES)] == [page in model for page in range(NUM_PAGES)]
        assert recent.num_among(range(NUM_PAGES)) == len(model)


def test_pages_that_come_and_go_for_ever_take_no_more_memory():
    recent = RecentPages()
    for _ in range(100 * MIN_LEFT_OVER):
        recent.add([3])
        recent.remove(3)
    recent.add([7])
    recent.add([2, 3])
    assert sum(len(pages) for _, pages in recent._runs) <= MIN_LEFT_OVER + 10
    assert recent.pop(3) == [7, 2, 3]


def test_pages_that_are_not_there_cannot_be_taken_out():
    recent = RecentPages()
    recent.add([1])
    with pytest.raises(PageError, match="page 5 is not cached"):
        recent.remove(5)
    with pytest.raises(PageError, match="2 pages are to be evicted, 1 are cached"):
        recent.pop(2)
    assert recent.pop(1) == [1]
