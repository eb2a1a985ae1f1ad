"""The columns: what a seat holds, and what goes back into the request."""

from __future__ import annotations

import numpy as np
from tests.sched.rig import make_request

from equipoise.sched.columns import STOP_IDS_WIDTH, Columns


def seated(request, seat=1, **pages):
    columns = Columns(3, max_model_len=5000, page_size=4)
    columns.seat(request, seat)
    return columns


def test_a_seat_holds_the_known_tokens_and_lengths():
    request = make_request(7, prompt=[5, 6, 7], max_tokens=9)
    request.output_ids = [8, 9]
    request.pages = [4, 2]
    request.num_computed = 3
    columns = seated(request)
    assert request.seat == 1
    assert columns.handle.tolist() == [-1, 7, -1]
    assert columns.tokens[1, :5].tolist() == [5, 6, 7, 8, 9]
    assert [int(column[1]) for column in (columns.computed, columns.known, columns.length)] == [3, 5, 5]
    assert (columns.stop_len[1], columns.capacity[1]) == (12, 8)
    assert columns.page_table[1, :2].tolist() == [4, 2]


def test_stop_ids_fill_their_width_and_no_more():
    columns = seated(make_request(stop_token_ids=tuple(range(20))))
    assert columns.stop_ids[:, 1].tolist() == list(range(STOP_IDS_WIDTH))
    columns.seat(make_request(1, stop_token_ids=(3,)), 1)
    assert columns.stop_ids[:, 1].tolist() == [3] + [-1] * (STOP_IDS_WIDTH - 1)


def test_new_pages_are_appended_to_the_page_table():
    request = make_request()
    request.pages = [9]
    columns = seated(request)
    request.pages += [3, 5]
    columns.write_pages(request, 1)
    assert columns.page_table[1, :3].tolist() == [9, 3, 5]
    assert columns.capacity[1] == 12


def test_leaving_a_seat_takes_the_outputs_along():
    request = make_request(prompt=[5, 6], max_tokens=9)
    request.output_ids = [7]
    columns = seated(request)
    columns.tokens[1, 3:5] = [8, 9]
    columns.known[1] = 5
    columns.computed[1] = 4
    columns.read_outputs(request, 1)
    columns.read_outputs(request, 1)  # again, with nothing new
    assert request.output_ids == [7, 8, 9]
    columns.unseat(request, 1)
    assert request.output_ids == [7, 8, 9]
    assert (request.seat, request.num_computed, columns.handle[1]) == (None, 4, -1)


def test_tokens_widen_for_long_requests_and_keep_what_they_hold():
    columns = seated(make_request(prompt=[5, 6], max_tokens=9))
    columns.seat(make_request(1, prompt=3000, max_tokens=9, max_model_len=5000), 2)
    assert columns.tokens.shape[1] >= 3009
    assert columns.tokens[1, :2].tolist() == [5, 6]
    columns.seat(make_request(2, prompt=4990, max_tokens=10, max_model_len=5000), 0)
    assert columns.tokens.shape[1] == 5000


def test_seats_gain_a_page_each():
    columns = Columns(3, max_model_len=5000, page_size=4)
    for handle, seat, pages in ((0, 2, [7]), (1, 0, [5, 6])):
        request = make_request(handle)
        request.pages = pages
        columns.seat(request, seat)
    columns.add_pages(np.array([2, 0]), [8, 9])
    assert columns.page_table[[2, 0], :3].tolist() == [[7, 8, 0], [5, 6, 9]]
    assert columns.capacity.tolist() == [12, 0, 8]


def test_the_tokens_of_pages_are_gathered_by_their_ends():
    columns = Columns(3, max_model_len=5000, page_size=4)
    columns.seat(make_request(0, prompt=list(range(8))), 1)
    columns.seat(make_request(1, prompt=list(range(20, 28))), 2)
    tokens = columns.last_page_tokens(np.array([2, 1]), np.array([3, 7]))
    assert tokens.tolist() == [[20, 21, 22, 23], [4, 5, 6, 7]]
    assert tokens.dtype == np.int32
