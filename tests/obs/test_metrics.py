from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from equipoise.engine.messages import GroupLoad, RankLoad
from equipoise.obs.metrics import ServerMetrics, Timing


def load(dp_rank: int, used: int) -> RankLoad:
    return RankLoad(
        dp_rank, 0.0, 3, 4, 50, used, used + 50, 1000, 8, used / 1000, 12.5, 0.5, total_steps=9, num_sent_tokens=6
    )


def samples(metrics: ServerMetrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Value by (name, labels), as a scraper reads the page."""
    families = text_string_to_metric_families(metrics.text().decode())
    return {(row.name, tuple(sorted(row.labels.items()))): row.value for family in families for row in family.samples}


def test_loads_are_read_at_the_scrape_under_both_names() -> None:
    loads = [load(0, 100), load(1, 300)]
    metrics = ServerMetrics(lambda: loads)
    for rank, used in ((0, 100), (1, 300)):
        labels = (("dp_rank", str(rank)),)
        found = samples(metrics)
        assert found["equipoise_num_used_tokens", labels] == used
        assert found["sglang:num_used_tokens", labels] == used
        assert found["sglang:num_running_reqs", labels] == 3
        assert found["sglang:num_queue_reqs", labels] == 4
        assert found["sglang:token_usage", labels] == used / 1000
        assert found["equipoise_steps_total", labels] == 9
        assert found["equipoise_num_sent_tokens", labels] == 6
    loads[:] = [load(0, 7)]
    assert samples(metrics)["equipoise_num_used_tokens", (("dp_rank", "0"),)] == 7


def test_what_lockstep_costs_is_there_for_ranks_in_lockstep() -> None:
    in_group = load(1, 300)
    in_group.group = GroupLoad(40, 0.25, 1.5)
    found = samples(ServerMetrics(lambda: [load(0, 100), in_group]))
    names = ("equipoise_exchanges_total", "equipoise_exchange_seconds_total", "equipoise_group_wait_seconds_total")
    assert [found[name, (("dp_rank", "1"),)] for name in names] == [40, 0.25, 1.5]
    assert not any((name, (("dp_rank", "0"),)) in found for name in names)


def test_ranks_that_do_not_answer_are_down() -> None:
    found = samples(ServerMetrics(lambda: [load(1, 3)], lambda: {0: False, 1: True}))
    assert [found["equipoise_rank_up", (("dp_rank", rank),)] for rank in "01"] == [0, 1]
    assert ("equipoise_num_used_tokens", (("dp_rank", "0"),)) not in found


def test_latencies_of_one_request() -> None:
    metrics = ServerMetrics(list)
    timing = Timing(metrics, 10.0)
    timing.on_tokens(10.3, 1)
    timing.on_tokens(10.34, 1)
    timing.on_tokens(10.44, 2)  # two that came together: half the gap each
    timing.finish(10.5, 7, "stop", 2)
    found = samples(metrics)
    assert found["equipoise_time_to_first_token_seconds_sum", ()] == 10.3 - 10.0
    assert found["equipoise_inter_token_latency_seconds_count", ()] == 3
    assert found["equipoise_inter_token_latency_seconds_bucket", (("le", "0.05"),)] == 3
    assert found["equipoise_inter_token_latency_seconds_bucket", (("le", "0.03"),)] == 0
    assert abs(found["equipoise_inter_token_latency_seconds_sum", ()] - 0.14) < 1e-9
    assert abs(found["equipoise_time_per_output_token_seconds_sum", ()] - 0.14 / 3) < 1e-9
    assert found["equipoise_e2e_request_latency_seconds_sum", ()] == 0.5
    assert found["equipoise_request_prompt_tokens_sum", ()] == 7
    assert found["equipoise_request_output_tokens_sum", ()] == 4


def test_a_gap_on_a_bound_belongs_to_its_bucket() -> None:
    metrics = ServerMetrics(list)
    metrics.gaps.observe(0.05, 1)
    metrics.gaps.observe(100.0, 2)
    found = samples(metrics)
    assert found["equipoise_inter_token_latency_seconds_bucket", (("le", "0.05"),)] == 1
    assert found["equipoise_inter_token_latency_seconds_bucket", (("le", "+Inf"),)] == 3
