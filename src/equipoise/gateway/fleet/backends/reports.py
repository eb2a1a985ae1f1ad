"""Load reports: from what a worker answers to one sample per rank.

A rank whose numbers make no sense (negative, text, missing) is left out: it is stale soon, and skipped. An answer
without any rank that makes sense is a broken feed: `ReportError`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

from equipoise.gateway.fleet.backends.metrics_text import samples

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MAX_AGE_S = 86400.0
"""Timestamps further apart than a day are of different clocks: the age is unknown."""
MAX_TOKENS = 1 << 50
"""No rank has more; more is an error of the worker."""


class ReportError(Exception):
    """The answer is no load report; the message says why, in one clause."""


@dataclass(frozen=True, slots=True)
class RankSample:
    """What a worker says of one rank. None: it does not say.

    number: the worker's own number for the rank
    tokens: used, and waiting where it tells them
    num_generated: output tokens so far; gen_throughput: output tokens per second
    age_s: how old the numbers were when the worker answered
    """

    number: int
    tokens: int
    num_running: int = 0
    num_waiting: int = 0
    max_total_tokens: int | None = None
    gen_throughput: float | None = None
    num_generated: float | None = None
    age_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Feed:
    """Where load reports come from: GET `path`, read by `parse`, which raises ReportError."""

    name: str
    path: str
    parse: Callable[[bytes], list[RankSample]]


def parse_loads(body: bytes) -> list[RankSample]:
    """/v1/loads of SGLang 0.5.23 and of Equipoise: an object whose `loads` has an object per rank.

    The age of a rank's numbers is the answer's timestamp less the rank's own: both are the worker's clock."""
    answer = _json(body)
    if not isinstance(answer, dict) or not isinstance(answer.get("loads"), list):
        raise ReportError("there is no list of loads in it")
    return _ranks(answer["loads"], _unix_s(answer.get("timestamp")))


def parse_get_load(body: bytes) -> list[RankSample]:
    """/get_load of older SGLang: a list with an object per rank."""
    answer = _json(body)
    if not isinstance(answer, list):
        raise ReportError("it is not a list of loads")
    return _ranks(answer, None)


LOADS = Feed("/v1/loads", "/v1/loads", parse_loads)
GET_LOAD = Feed("/get_load", "/get_load", parse_get_load)


def count(value: object) -> int | None:
    """`value` as a count of things; None unless it is a number that can be one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if 0 <= value <= MAX_TOKENS else None


def per_rank(page: bytes, name: bytes, label: bytes) -> dict[int, float]:
    """The metric `name` by the rank that `label` names (0 where a line names none).

    Several lines of a rank, one per tensor-parallel worker, say the same at slightly different times: the largest
    counts. Lines whose rank is no number are left out."""
    values: dict[int, float] = {}
    for labels, value in samples(page, name):
        rank = number_of(labels.get(label, b"0"))
        if rank is not None:
            values[rank] = max(value, values.get(rank, value))
    return values


def number_of(text: bytes | None) -> int | None:
    """A label's value as a whole number of at most nine digits; None where it is none."""
    return int(text) if text is not None and text.isdigit() and len(text) <= 9 else None


def total(page: bytes, name: bytes) -> float:
    """The sum of the metric `name` over all its lines."""
    return sum(value for _, value in samples(page, name))


def _json(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise ReportError(f"not JSON: {error}") from None


def _ranks(loads: list[Any], now_s: float | None) -> list[RankSample]:
    found = [sample for load in loads if isinstance(load, dict) and (sample := _rank(load, now_s)) is not None]
    if not found:
        raise ReportError("it has no rank with sensible numbers")
    return found


def _rank(load: Mapping[str, Any], now_s: float | None) -> RankSample | None:
    number = count(load.get("dp_rank", 0))
    tokens = _tokens(load)
    running = load.get("num_running_reqs")
    waiting = count(load.get("num_waiting_reqs", 0))
    if running is None:  # the older form counts running and waiting together
        reqs = count(load.get("num_reqs", 0))
        running = max(0, reqs - waiting) if reqs is not None and waiting is not None else None
    running = count(running)
    if number is None or tokens is None or running is None or waiting is None:
        return None
    return RankSample(
        number,
        tokens,
        running,
        waiting,
        max_total_tokens=count(load.get("max_total_num_tokens")) or None,
        gen_throughput=count(load.get("gen_throughput")),
        age_s=_age_s(now_s, _unix_s(load.get("timestamp"))),
    )


def _tokens(load: Mapping[str, Any]) -> int | None:
    """Used and waiting tokens, by the first of the names that is there."""
    for name in ("num_total_tokens", "num_tokens", "num_used_tokens"):
        if name in load:
            return count(load[name])
    return None


def _unix_s(stamp: object) -> float | None:
    """A timestamp as unix seconds: a number, a number as text, or ISO 8601 (in UTC where it does not say)."""
    if not isinstance(stamp, int | float | str):
        return None
    try:
        return float(stamp)
    except OverflowError:
        return None
    except ValueError:
        pass
    try:
        parsed = datetime.fromisoformat(str(stamp))
    except ValueError:
        return None
    return (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()


def _age_s(now_s: float | None, then_s: float | None) -> float:
    """Seconds between two timestamps of the worker; 0 where one is missing or they cannot be compared."""
    if now_s is None or then_s is None:
        return 0.0
    age_s = now_s - then_s
    return age_s if 0.0 < age_s < MAX_AGE_S else 0.0
