"""SGLang servers.

What it is: `/server_info` (older: `/get_server_info`) with dp_size, disaggregation_mode ("null", "prefill", "decode")
and disaggregation_bootstrap_port. A rank travels as `routed_dp_rank` in the body and as X-Data-Parallel-Rank; older
versions know one of them only, and the header outranks the body. Load: `/v1/loads` since 0.5.23, gauges before
(`sglang:num_used_tokens`, spelt `sglang_num_used_tokens` by some exporters), `/get_load` older still.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from equipoise.gateway.fleet.backends.models import check_num_ranks, list_models
from equipoise.gateway.fleet.backends.reports import (
    GET_LOAD,
    LOADS,
    Feed,
    RankSample,
    ReportError,
    count,
    per_rank,
    total,
)
from equipoise.gateway.fleet.fetch import FetchError
from equipoise.gateway.fleet.worker import Found, rank_place

if TYPE_CHECKING:
    from equipoise.config.worker import WorkerRole
    from equipoise.gateway.fleet.backends.models import Models
    from equipoise.gateway.fleet.fetch import Site

INFO_PATHS = ("/server_info", "/get_server_info")
RANK_FIELD = "routed_dp_rank"
ROLES: dict[str, WorkerRole] = {"null": "mixed", "prefill": "prefill", "decode": "decode"}


async def find(site: Site, models: Models | None = None) -> Found | None:
    """What the server says of itself; None when it is no SGLang server. Raises FetchError when it does not answer."""
    info = await server_info(site)
    if info is None or not ("disaggregation_mode" in info or "internal_states" in info or "model_path" in info):
        return None
    models = models or await list_models(site)
    num_ranks = count(info.get("dp_size", 1)) or 1
    check_num_ranks(num_ranks)
    return Found(
        "sglang",
        models.names or _served_name(info),
        tuple(range(num_ranks)),
        tuple(rank_place(rank, RANK_FIELD) for rank in range(num_ranks)) if num_ranks > 1 else (),
        ROLES.get(str(info.get("disaggregation_mode") or "null")),
        count(info.get("disaggregation_bootstrap_port")),
        str(info.get("version", "")),
        models.cards,
    )


async def server_info(site: Site) -> dict[str, Any] | None:
    """The object at /server_info or /get_server_info; None where neither is known."""
    for path in INFO_PATHS:
        answer = await site.get(path)
        if answer.status >= 500:
            raise FetchError(f"{path} answered {answer.status}")
        if answer.is_ok:
            info = answer.json()
            return info if isinstance(info, dict) else None
    return None


def parse_metrics(page: bytes) -> list[RankSample]:
    """The gauges of /metrics, by `dp_rank`.

    Waiting requests are counted, not measured, there: each is taken for a prompt of mean length. Raises
    ReportError."""
    for prefix in (b"sglang:", b"sglang_"):
        used = per_rank(page, prefix + b"num_used_tokens", b"dp_rank")
        if used:
            return _samples(page, prefix, used)
    raise ReportError("it has no num_used_tokens")


def _samples(page: bytes, prefix: bytes, used: dict[int, float]) -> list[RankSample]:
    running, waiting, capacity, throughput = (
        per_rank(page, prefix + name, b"dp_rank")
        for name in (b"num_running_reqs", b"num_queue_reqs", b"max_total_num_tokens", b"gen_throughput")
    )
    mean_prompt = total(page, prefix + b"prompt_tokens_total") / max(1.0, total(page, prefix + b"num_requests_total"))
    found = []
    for number, tokens in used.items():
        num_used, num_waiting = count(tokens), count(waiting.get(number, 0.0))
        num_running = count(running.get(number, 0.0))
        if num_used is None or num_waiting is None or num_running is None:
            continue
        all_tokens = count(num_used + num_waiting * max(0.0, mean_prompt))
        if all_tokens is None:
            continue
        found.append(
            RankSample(
                number,
                all_tokens,
                num_running,
                num_waiting,
                count(capacity.get(number)) or None,
                throughput.get(number) if count(throughput.get(number)) is not None else None,
            )
        )
    if not found:
        raise ReportError("it has no rank with sensible numbers")
    return found


def _served_name(info: dict[str, Any]) -> tuple[str, ...]:
    name = info.get("served_model_name") or info.get("model_path")
    return (name,) if isinstance(name, str) else ()


METRICS = Feed("sglang metrics", "/metrics", parse_metrics)
FEEDS = (LOADS, METRICS, GET_LOAD)
