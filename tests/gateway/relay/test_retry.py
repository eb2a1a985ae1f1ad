"""When a request is tried again, and after how long."""

from __future__ import annotations

from random import Random

import pytest

from equipoise.gateway.relay.retry import Retries, RetryRules, is_retried, retry_after_s


def retries(seed: int = 0, **rules: float) -> Retries:
    return Retries(RetryRules(**rules), Random(seed))  # type: ignore[arg-type]


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504, 507, 529, 599])
def test_what_another_worker_may_do_better(status: int) -> None:
    assert is_retried(status)


@pytest.mark.parametrize("status", [200, 204, 301, 400, 401, 403, 404, 405, 409, 413, 422, 431, 499, 501, 505])
def test_what_no_other_worker_does_better(status: int) -> None:
    assert not is_retried(status)


def test_delays_double_up_to_the_most_and_end() -> None:
    plain = retries(max_retries=6, delay_s=0.1, max_delay_s=1.0, jitter=0.0)
    delays = [plain.delay_s(num_tries, 0.0) for num_tries in range(1, 8)]
    assert delays == [pytest.approx(0.1), pytest.approx(0.2), pytest.approx(0.4), pytest.approx(0.8), 1.0, 1.0, None]


def test_no_retries_is_none() -> None:
    assert retries(max_retries=0).delay_s(1, 0.0) is None


def test_jitter_shortens_by_at_most_its_share_and_follows_the_seed() -> None:
    def delays(seed: int) -> list[float | None]:
        jittered = retries(seed, delay_s=1.0, max_delay_s=1.0, jitter=0.5)
        return [jittered.delay_s(1, 0.0) for _ in range(200)]

    assert all(delay is not None and 0.5 <= delay <= 1.0 for delay in delays(1))
    assert len(set(delays(1))) == 200
    assert delays(1) == delays(1) != delays(2)


def test_retry_after_is_heeded_up_to_the_most() -> None:
    rules = retries(delay_s=0.1, max_delay_s=2.0)
    assert rules.delay_s(1, 0.0, 1.5) == 1.5
    assert rules.delay_s(1, 0.0, 2.5) is None
    delay = rules.delay_s(1, 0.0, 0.0)
    assert delay is not None
    assert 0.05 <= delay <= 0.1


def test_all_tries_together_take_a_bounded_time() -> None:
    rules = retries(delay_s=1.0, max_delay_s=1.0, jitter=0.0, max_total_s=10.0)
    assert rules.delay_s(1, 9.0) == 1.0
    assert rules.delay_s(1, 9.1) is None


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(b"3", 3.0), (b" 3 ", 3.0), (b"0", 0.0), (b"-1", None), (b"", None), (b"1.5", None), (b"Wed, 21 Oct 2026", None)],
)
def test_retry_after_is_read_in_seconds(value: bytes, seconds: float | None) -> None:
    assert retry_after_s([(b"X", b"9"), (b"retry-AFTER", value)]) == seconds


def test_no_retry_after_is_none() -> None:
    assert retry_after_s([(b"X", b"9")]) is None
