"""Load reports: what servers answer, as numbers per rank; nonsense is a broken feed or a rank left out."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.gateway.fleet.backends.equipoise import FEEDS as OUR_FEEDS
from equipoise.gateway.fleet.backends.reports import (
    RankSample,
    ReportError,
    count,
    number_of,
    parse_get_load,
    parse_loads,
)
from equipoise.gateway.fleet.backends.sglang import FEEDS as SGLANG_FEEDS
from equipoise.gateway.fleet.backends.sglang import parse_metrics as parse_sglang
from equipoise.gateway.fleet.backends.vllm import parse_metrics as parse_vllm


def encoded(value: object) -> bytes:
    return json.dumps(value).encode()


def rank(number: int, tokens: object, **other: object) -> dict[str, Any]:
    """An entry of /v1/loads as SGLang 0.5.23 writes it."""
    return {
        "timestamp": 1000.0,
        "dp_rank": number,
        "num_running_reqs": 3,
        "num_waiting_reqs": 2,
        "num_waiting_uncached_tokens": 50,
        "num_used_tokens": 700,
        "num_total_tokens": tokens,
        "num_active_tokens": 650,
        "max_total_num_tokens": 100000,
        "max_running_requests": 256,
        "token_usage": 0.007,
        "gen_throughput": 812.5,
        "cache_hit_rate": 0.5,
        "utilization": 0.0,
    } | other


def loads(*ranks: object, timestamp: object = 1000.0) -> bytes:
    return encoded({"timestamp": timestamp, "version": "0.5.23", "dp_rank_count": len(ranks), "loads": ranks})


def test_loads_of_sglang() -> None:
    assert parse_loads(loads(rank(0, 900), rank(1, 0))) == [
        RankSample(0, 900, 3, 2, 100000, 812),
        RankSample(1, 0, 3, 2, 100000, 812),
    ]


def test_loads_of_equipoise() -> None:
    ours = {
        "dp_rank": 0, "timestamp": 5.0, "num_running_reqs": 1, "num_waiting_reqs": 0, "num_waiting_tokens": 10,
        "num_used_tokens": 20, "num_tokens": 30, "max_total_num_tokens": 64, "gen_throughput": 0.0,
    }  # fmt: skip
    assert parse_loads(loads(ours, timestamp=5.5)) == [RankSample(0, 30, 1, 0, 64, 0.0, age_s=0.5)]


@pytest.mark.parametrize(
    ("now", "then", "age_s"),
    [
        (1000.5, 1000.0, 0.5),
        ("1000.5", 1000.0, 0.5),
        ("1000.5", "999.5", 1.0),
        ("1970-01-01T00:20:00+00:00", 1100.0, 100.0),
        ("1970-01-01T00:20:00Z", 1100.0, 100.0),
        ("1970-01-01T02:20:00+02:00", "1970-01-01T00:18:20", 100.0),
        (1000.0, 1000.1, 0.0),  # written by two processes
        (1.7e9, 12.0, 0.0),  # different clocks
        (None, 1000.0, 0.0),
        (1000.0, None, 0.0),
        ("soon", 1000.0, 0.0),
        ({}, [], 0.0),
    ],
)
def test_age_is_the_difference_of_the_workers_own_timestamps(now: object, then: object, age_s: float) -> None:
    assert parse_loads(loads(rank(0, 1, timestamp=then), timestamp=now))[0].age_s == pytest.approx(age_s)


@pytest.mark.parametrize(
    "wrong",
    [
        rank(0, -1), rank(0, "many"), rank(0, None), rank(0, True), rank(0, 1e300), rank(0, [1]), rank(-1, 5),
        rank(0, 1, num_running_reqs=-1), rank(0, 1, num_waiting_reqs="x"), {"dp_rank": 0}, {}, "text", None, 7,
    ],
)  # fmt: skip
def test_a_rank_with_wrong_numbers_is_left_out(wrong: object) -> None:
    assert [sample.number for sample in parse_loads(loads(wrong, rank(1, 5)))] == [1]
    with pytest.raises(ReportError, match="no rank with sensible numbers"):
        parse_loads(loads(wrong))


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"{}", b'{"loads": 3}', b'{"loads": []}', b"\xff", b"null"])
def test_what_is_no_report_is_refused(body: bytes) -> None:
    for feed in (*SGLANG_FEEDS, *OUR_FEEDS):
        with pytest.raises(ReportError):
            feed.parse(body)
    with pytest.raises(ReportError):
        parse_vllm(body)


def test_get_load_of_older_sglang() -> None:
    body = encoded([{"dp_rank": 0, "num_reqs": 5, "num_waiting_reqs": 2, "num_tokens": 900}, {"dp_rank": 1}])
    assert parse_get_load(body) == [RankSample(0, 900, 3, 2)]


def test_feeds_are_asked_in_order_of_preference() -> None:
    assert [feed.path for feed in SGLANG_FEEDS] == ["/v1/loads", "/metrics", "/get_load"]
    assert [feed.path for feed in OUR_FEEDS] == ["/v1/loads", "/get_load"]


SGLANG = """\
# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{dp_rank="0",engine_type="unified",model_name="llama \\"8B\\"",pp_rank="0",tp_rank="0"} 4.0
sglang:num_running_reqs{dp_rank="1",engine_type="unified",model_name="llama \\"8B\\"",pp_rank="0",tp_rank="1"} 1.0
# HELP sglang:num_used_tokens The number of used tokens.
# TYPE sglang:num_used_tokens gauge
sglang:num_used_tokens{dp_rank="0",engine_type="unified",model_name="llama \\"8B\\"",pp_rank="0",tp_rank="0"} 12345.0
sglang:num_used_tokens{dp_rank="1",engine_type="unified",model_name="llama \\"8B\\"",pp_rank="0",tp_rank="1"} 70.0
sglang:num_used_tokens{dp_rank="1",engine_type="unified",model_name="llama \\"8B\\"",pp_rank="0",tp_rank="2"} 67.0
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{dp_rank="0",model_name="llama \\"8B\\""} 3.0
sglang:num_queue_reqs{dp_rank="1",model_name="llama \\"8B\\""} 0.0
sglang:max_total_num_tokens{dp_rank="0",model_name="llama \\"8B\\""} 500000.0
sglang:gen_throughput{dp_rank="0",model_name="llama \\"8B\\""} 99.5
sglang:prompt_tokens_total{model_name="llama \\"8B\\""} 5000.0
sglang:num_requests_total{model_name="llama \\"8B\\""} 50.0
sglang:num_used_tokens_by_pool{dp_rank="7"} 1.0
"""


@pytest.mark.parametrize("digits", [30, 400, 5000])
@pytest.mark.parametrize("entry", ["num_total_tokens", "num_running_reqs", "gen_throughput", "dp_rank", "timestamp"])
def test_numbers_without_end_break_nothing(entry: str, digits: int) -> None:
    body = encoded({"timestamp": 1000.5, "loads": [rank(0, 5), rank(1, 6) | {entry: 12345678}]})
    try:
        assert parse_loads(body.replace(b"12345678", b"9" * digits))[0].tokens == 5
    except ReportError:
        assert digits == 5000


@pytest.mark.parametrize("sums", ["1e308", "1e300"])
def test_a_mean_prompt_that_cannot_be_breaks_nothing(sums: str) -> None:
    lines = ['sglang:num_used_tokens{dp_rank="0"} 1', 'sglang:num_queue_reqs{dp_rank="0"} 1']
    lines += [f'sglang:prompt_tokens_total{{a="{number}"}} {sums}' for number in range(2)]
    with pytest.raises(ReportError):
        parse_sglang("\n".join(lines).encode())
    lines = ['vllm:num_requests_running{engine="0"} 1', 'vllm:num_requests_waiting{engine="0"} 1']
    lines += [f'vllm:request_prompt_tokens_sum{{a="{number}"}} {sums}' for number in range(2)]
    with pytest.raises(ReportError):
        parse_vllm("\n".join([*lines, "vllm:request_prompt_tokens_count 1"]).encode())


@pytest.mark.parametrize("prefix", ["sglang:", "sglang_"])
def test_gauges_of_sglang_in_both_spellings(prefix: str) -> None:
    assert parse_sglang(SGLANG.replace("sglang:", prefix).encode()) == [
        RankSample(0, 12345 + 3 * 100, 4, 3, 500000, 99.5),
        RankSample(1, 70, 1, 0),
    ]


def test_gauges_of_sglang_with_one_rank_name_none() -> None:
    assert parse_sglang(b'sglang:num_used_tokens{model_name="m"} 5\n') == [RankSample(0, 5)]


def test_wrong_gauges_of_sglang_leave_their_rank_out() -> None:
    page = b'sglang:num_used_tokens{dp_rank="0"} -5\nsglang:num_used_tokens{dp_rank="1"} 5\n'
    assert parse_sglang(page) == [RankSample(1, 5)]
    with pytest.raises(ReportError):
        parse_sglang(b'sglang:num_used_tokens{dp_rank="x"} 5\n')


VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="4",model_name="m"} 3.0
vllm:num_requests_running{engine="5",model_name="m"} 0.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="4",model_name="m"} 2.0
vllm:num_requests_waiting{engine="5",model_name="m"} 0.0
vllm:num_requests_waiting_by_reason{engine="4",model_name="m",reason="capacity"} 2.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="4",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="5",model_name="m"} 0.0
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="4",num_gpu_blocks="1000"} 1.0
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="5",num_gpu_blocks="2000"} 1.0
vllm:generation_tokens_total{engine="4",model_name="m"} 777.0
vllm:request_prompt_tokens_bucket{engine="4",le="100.0",model_name="m"} 10.0
vllm:request_prompt_tokens_count{engine="4",model_name="m"} 10.0
vllm:request_prompt_tokens_sum{engine="4",model_name="m"} 3000.0
vllm:request_generation_tokens_count{engine="4",model_name="m"} 10.0
vllm:request_generation_tokens_sum{engine="4",model_name="m"} 2000.0
"""


@pytest.mark.parametrize("usage", ["kv_cache_usage_perc", "gpu_cache_usage_perc"])
def test_gauges_of_vllm_as_tokens(usage: str) -> None:
    assert parse_vllm(VLLM.replace("kv_cache_usage_perc", usage).encode()) == [
        RankSample(4, 4000 + 2 * 300, 3, 2, 16000, num_generated=777.0),
        RankSample(5, 0, 0, 0, 32000),
    ]


def test_gauges_of_vllm_without_capacity_count_requests_at_their_mean_length() -> None:
    page = "".join(line for line in VLLM.splitlines(keepends=True) if "cache_config" not in line)
    assert [(each.tokens, each.max_total_tokens) for each in parse_vllm(page.encode())] == [
        (3 * 500 + 2 * 300, None),
        (0, None),
    ]


def test_gauges_of_an_old_vllm_have_no_engine() -> None:
    page = (
        b'vllm:num_requests_running{model_name="m"} 1\nvllm:gpu_cache_usage_perc{model_name="m"} 0.5\n'
        b'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1\n'
    )
    assert parse_vllm(page) == [RankSample(0, 800, 1, 0, 1600)]


@pytest.mark.parametrize("config", ['num_gpu_blocks="None"', 'num_gpu_blocks="' + "9" * 9999 + '"', ""])
def test_a_capacity_that_is_none_is_not_told(config: str) -> None:
    page = f'vllm:num_requests_running{{engine="0"}} 1\nvllm:cache_config_info{{block_size="16",{config}}} 1\n'
    assert parse_vllm(page.encode())[0].max_total_tokens is None


def test_wrong_gauges_of_vllm_leave_their_engine_out() -> None:
    page = VLLM.replace('usage_perc{engine="4",model_name="m"} 0.25', 'usage_perc{engine="4",model_name="m"} 1.5')
    assert [each.number for each in parse_vllm(page.encode())] == [5]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.fixed_dictionaries({}, optional=dict.fromkeys(rank(0, 0), json_values)), max_size=4), json_values)
def test_no_numbers_make_it_fail(entries: list[dict[str, Any]], timestamp: object) -> None:
    body = encoded({"timestamp": timestamp, "loads": entries})
    for parse, text in ((parse_loads, body), (parse_get_load, encoded(entries))):
        try:
            found = parse(text)
        except ReportError:
            continue
        for sample in found:
            assert min(sample.number, sample.tokens, sample.num_running, sample.num_waiting, sample.age_s) >= 0


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0, 0), (5.9, 5), (-1, None), (float("nan"), None), (float("inf"), None), (True, None), ("5", None), (None, None)],
)
def test_count(value: object, expected: int | None) -> None:
    assert count(value) == expected


@pytest.mark.parametrize(("text", "number"), [(b"7", 7), (b"", None), (b"-1", None), (b"9" * 10, None), (None, None)])
def test_number_of(text: bytes | None, number: int | None) -> None:
    assert number_of(text) == number
