"""The wire between server process and rank process: msgspec structs, msgpack, one message per step.

    server ──Add, Abort, Call, Stop──> rank
    rank ──Ready | Failed, then Step, Reply──> server

Token arrays travel as little-endian bytes: int32 tokens, int64 handles.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from equipoise.exec.protocol import ExecutorInfo, TokenLogprobs
from equipoise.request import FinishReason, SamplingParams

CallMethod = Literal["flush_cache", "pause", "resume", "loads", "explain", "decisions", "timeline", "ping"]


class Add(msgspec.Struct, tag="add", omit_defaults=True):
    """A new request. `handle` is drawn by the server and never reused; `prompt` is (n,) int32 as bytes."""

    handle: int
    request_id: str
    prompt: bytes
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    timeout_s: float | None = None


class Abort(msgspec.Struct, tag="abort"):
    """End these requests now; handles that have ended already are ignored.

    `reason` "stop" is a stop string found by the server: the request ends well."""

    handles: list[int]
    reason: FinishReason = "abort"


class Call(msgspec.Struct, tag="call", omit_defaults=True):
    """Ask the rank for something; answered by the Reply with the same `call_id`.

    flush_cache() -> pages dropped; pause(mode="new"|"all") and resume() -> None; loads() -> RankLoad;
    explain(request_id=...) -> the Explanation of each request of that name; decisions() -> the last Decisions,
    None unless traced; timeline() -> the last StepSpans, None unless kept; ping() -> None, answered from inside the
    engine loop."""

    call_id: int
    method: CallMethod
    args: dict[str, Any] = {}


class Stop(msgspec.Struct, tag="stop"):
    """End the rank process: outstanding steps are awaited, everything else is dropped."""


ToRank = Add | Abort | Call | Stop


class GroupLoad(msgspec.Struct, array_like=True):
    """What being in step with others cost a rank of a lockstep group, since it started.

    total_exchanges, total_exchange_s: exchanges of states, and the seconds that it spent in them
    total_wait_s: seconds of steps in which it had done its part and waited for the slowest"""

    total_exchanges: int
    total_exchange_s: float
    total_wait_s: float


class RankLoad(msgspec.Struct):
    """A rank's load and counters at one moment. `num_tokens` = used + waiting. Times are unix seconds.

    num_waiting_uncached_tokens: prefill that is owed: waiting tokens less those known to be cached, and what is left
        of the prompts that run, num_prefilling_tokens
    num_inflight_rows: rows of the steps launched and not yet back
    num_expected_output_tokens: tokens still to come of running requests, up to their stop lengths
    num_reserved_tokens: room promised to requests whose KV comes from elsewhere
    num_sent_reqs, num_sent_tokens: of a prefill rank: sent to a decode rank, not acknowledged

    Totals count since the rank started."""

    dp_rank: int
    timestamp: float
    num_running_reqs: int
    num_waiting_reqs: int
    num_waiting_tokens: int
    num_used_tokens: int
    num_tokens: int
    max_total_num_tokens: int
    max_running_requests: int
    token_usage: float
    gen_throughput: float
    cache_hit_rate: float
    total_steps: int = 0
    total_prompt_tokens: int = 0
    total_cached_tokens: int = 0
    total_output_tokens: int = 0
    total_preemptions: int = 0
    total_finished: int = 0
    total_aborted: int = 0
    step_ms: float = 0.0
    paused: str = ""
    num_waiting_uncached_tokens: int = 0
    num_prefilling_tokens: int = 0
    num_inflight_rows: int = 0
    num_expected_output_tokens: int = 0
    num_reserved_tokens: int = 0
    num_sent_reqs: int = 0
    num_sent_tokens: int = 0
    group: GroupLoad | None = None


class Finished(msgspec.Struct, array_like=True):
    """A request that ended. `stop_id` is the stop token that ended it; `error` says why it failed;
    `field` names the request's field when the request itself was at fault; `status` is the error's HTTP status."""

    handle: int
    reason: FinishReason
    num_cached: int = 0
    stop_id: int | None = None
    error: str | None = None
    field: str | None = None
    status: int = 500


class RowLogprobs(msgspec.Struct, array_like=True):
    """Logprobs of the token at `index` of the message's token array."""

    index: int
    logprobs: TokenLogprobs


class PromptLogprobs(msgspec.Struct, array_like=True):
    """Logprobs of a chunk of a prompt, in order."""

    handle: int
    logprobs: list[TokenLogprobs]


class Step(msgspec.Struct, tag="step", omit_defaults=True):
    """What one step delivered: tokens[i] goes to handles[i]; a request may end with or without a token here.

    num_added: requests received since the rank started: `load` includes them and no others
    cached: prompt tokens that the prefix cache served, by handle, sent with a request's first token if any"""

    handles: bytes
    tokens: bytes
    load: RankLoad
    num_added: int = 0
    finished: list[Finished] = []
    logprobs: list[RowLogprobs] = []
    prompt_logprobs: list[PromptLogprobs] = []
    cached: dict[int, int] = {}


class Reply(msgspec.Struct, tag="reply", omit_defaults=True):
    """Answer to a Call."""

    call_id: int
    value: Any = None
    error: str | None = None


class Ready(msgspec.Struct, tag="ready"):
    """The rank serves: its model is loaded and its loop runs."""

    dp_rank: int
    pid: int
    info: ExecutorInfo
    max_running: int
    startup_s: float


class Failed(msgspec.Struct, tag="failed"):
    """The rank cannot start or go on; `is_config` when the user's settings or checkpoint are at fault."""

    dp_rank: int
    error: str
    is_config: bool = False


FromRank = Ready | Failed | Step | Reply
