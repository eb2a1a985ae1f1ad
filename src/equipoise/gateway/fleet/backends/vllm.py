"""vLLM servers.

What it is: `/v1/models` owned by "vllm", and `/version`. Load: gauges on /metrics, labelled with the `engine`, which is
the rank within the whole deployment. A rank travels as X-Data-Parallel-Rank. How ranks are numbered depends on the
data-parallel mode, which no route tells; the engines on /metrics do:

| engines on /metrics | mode | header |
|---|---|---|
| one, any number | one rank, or external: each server is one rank | none: a worker with one rank is never pinned |
| 0 to n-1 | internal: one server fronts all ranks; or the first node of hybrid | the engine's number |
| s to s+n-1, s > 0 | hybrid: a server fronts the ranks of its node | see below |
| anything else | elastic, engines come and go | none: the server chooses |

A server of a hybrid deployment reads the header in one of two ways, by its front end. The Python one takes it as an
index into its own engines, 0 to n-1, and refuses others ("data_parallel_rank 4 is out of range [0, 4)",
vllm-project/vllm#32314; before that change a 500). The Rust one takes it as the rank within the deployment and
answers 400 "engine-core error" to others (vllm-project/router#210, where half of all requests failed because of that;
vllm-project/vllm#51178 says the same of its gRPC field). Nothing tells the two apart but a request: one
token is asked for under a number that only one of them takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from equipoise.gateway.fleet.backends.metrics_text import samples
from equipoise.gateway.fleet.backends.models import check_num_ranks, list_models
from equipoise.gateway.fleet.backends.reports import Feed, RankSample, ReportError, count, number_of, per_rank, total
from equipoise.gateway.fleet.fetch import FetchError
from equipoise.gateway.fleet.worker import RANK_HEADER, Found, RankPlace, rank_place

if TYPE_CHECKING:
    from equipoise.gateway.fleet.backends.models import Models
    from equipoise.gateway.fleet.fetch import Site

RUNNING = b"vllm:num_requests_running"
USAGES = (b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc")
"""The share of KV pages in use, 0 to 1; the second name until vLLM 0.10."""
REQUEST_TOKENS = 1024
"""Tokens that a request is taken for, where a server tells neither its capacity nor the lengths of its prompts."""


async def find(site: Site, models: Models | None = None) -> Found | None:
    """What the server says of itself; None when it is no vLLM server. Raises FetchError when it does not answer."""
    models = models or await list_models(site)
    version = await site.get("/version")
    page = await site.get("/metrics")
    engines = sorted(per_rank(page.body, RUNNING, b"engine")) if page.is_ok else []
    check_num_ranks(len(engines))
    if models.owner != "vllm" and not (version.is_ok and engines):
        return None
    places = await _places(site, engines, models)
    return Found(
        "vllm",
        models.names,
        tuple(engines) or (0,),
        places,
        version=_version(version.body) if version.is_ok else "",
        cards=models.cards,
    )


async def _places(site: Site, engines: list[int], models: Models) -> tuple[RankPlace, ...]:
    """How each engine is named in requests; none where it must not be, or cannot be found out."""
    num_ranks = len(engines)
    if num_ranks < 2 or engines != list(range(engines[0], engines[0] + num_ranks)):
        return ()
    # the last number is out of range where engines are counted from 0, as 0 is where they are not
    if engines[0] == 0 or await _takes(site, engines[-1], models):
        numbers = engines
    elif await _takes(site, 0, models):
        numbers = list(range(num_ranks))
    else:
        return ()
    return tuple(rank_place(number) for number in numbers)


async def _takes(site: Site, number: int, models: Models) -> bool:
    """Whether a request under rank `number` is served, in time."""
    body = {"model": models.names[0] if models.names else "", "prompt": "1", "max_tokens": 1}
    headers = [(RANK_HEADER, b"%d" % number)]
    try:
        return (await site.post("/v1/completions", msgspec.json.encode(body), headers)).is_ok
    except FetchError:  # it is too busy to tell: it is asked again later, and chooses ranks itself until then
        return False


def parse_metrics(page: bytes) -> list[RankSample]:
    """The gauges of /metrics, by `engine`.

    Tokens are the share of pages in use times the capacity (`cache_config_info`: pages times page size), and a mean
    prompt for each waiting request. Where the capacity is not told, a mean request for each one running. Raises
    ReportError."""
    running = per_rank(page, RUNNING, b"engine")
    if not running:
        raise ReportError("it has no num_requests_running")
    waiting = per_rank(page, b"vllm:num_requests_waiting", b"engine")
    generated = per_rank(page, b"vllm:generation_tokens_total", b"engine")
    usage = per_rank(page, USAGES[0], b"engine") or per_rank(page, USAGES[1], b"engine")
    capacity = _capacity(page)
    mean_prompt = _mean(page, b"vllm:request_prompt_tokens") or REQUEST_TOKENS
    mean_request = mean_prompt + _mean(page, b"vllm:request_generation_tokens")
    found = []
    for number, value in running.items():
        num_running, num_waiting = count(value), count(waiting.get(number, 0.0))
        share = usage.get(number)
        max_total = capacity.get(number, capacity.get(0) if len(capacity) == 1 else None)
        if num_running is None or num_waiting is None or (share is not None and not 0.0 <= share <= 1.0):
            continue
        used = share * max_total if share is not None and max_total is not None else num_running * mean_request
        tokens = count(used + num_waiting * mean_prompt)
        if tokens is None:
            continue
        found.append(
            RankSample(
                number,
                tokens,
                num_running,
                num_waiting,
                max_total,
                num_generated=generated.get(number),
            )
        )
    if not found:
        raise ReportError("it has no engine with sensible numbers")
    return found


def _capacity(page: bytes) -> dict[int, int]:
    """KV tokens by engine, of those that tell them."""
    found = {}
    for labels, _ in samples(page, b"vllm:cache_config_info"):
        pages, page_size = number_of(labels.get(b"num_gpu_blocks")), number_of(labels.get(b"block_size"))
        engine = number_of(labels.get(b"engine", b"0"))
        if pages and page_size and engine is not None:
            found[engine] = pages * page_size
    return found


def _mean(page: bytes, histogram: bytes) -> float:
    """The mean of a histogram, 0 where it is empty or missing."""
    number = total(page, histogram + b"_count")
    return max(0.0, total(page, histogram + b"_sum") / number) if number > 0 else 0.0


def _version(body: bytes) -> str:
    try:
        version = msgspec.json.decode(body)
    except msgspec.DecodeError:
        raise FetchError("/version is not JSON") from None
    return str(version.get("version", "")) if isinstance(version, dict) else ""


METRICS = Feed("vllm metrics", "/metrics", parse_metrics)
FEEDS = (METRICS,)
