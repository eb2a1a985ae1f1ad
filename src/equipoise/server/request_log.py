"""One line for every request that asks the engine for tokens, written when it ends (`--log-requests`)."""

from __future__ import annotations

import json
import logging
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.types import Scope

    from equipoise.obs.metrics import Timing
    from equipoise.server.service import Job

log = logging.getLogger(__name__)

GENERATING = frozenset({"/v1/completions", "/v1/chat/completions", "/generate"})
"""Routes whose requests get a line."""
CLIENT_LEFT = 499
"""The status, in log and metrics, of a request whose client left before the answer was out."""


@dataclass(frozen=True, slots=True)
class Served:
    """What one HTTP request asked for: its jobs, and a timing for each choice of each job, in order."""

    jobs: Sequence[Job]
    timings: Sequence[Timing]

    @property
    def num_prompt(self) -> int:
        """Prompt tokens; the choices of a job share them."""
        return sum(len(job.prompt_ids) for job in self.jobs)

    @property
    def num_cached(self) -> int:
        """Prompt tokens that the prefix cache served, counted as `usage` does: those of a job's first choice."""
        total = at = 0
        for job in self.jobs:
            total += self.timings[at].num_cached
            at += job.params.n
        return total

    @property
    def num_output(self) -> int:
        """Tokens drawn, of all choices."""
        return sum(timing.num_output for timing in self.timings)

    @property
    def ttft_s(self) -> float | None:
        """Seconds from arrival to the first token of any choice; None when there was none."""
        return min((timing.first_s - timing.arrival_s for timing in self.timings if timing.num_output), default=None)


NOTHING = Served((), ())
"""Of a request that was refused before it had prompts."""


def log_request(scope: Scope, route: str, status: int, total_s: float) -> None:
    """Write the line of a request that just ended."""
    log.info("%s", request_line(scope["request_id"], route, status, total_s, scope.get("served", NOTHING)))


def request_line(request_id: str, route: str, status: int, total_s: float, served: Served) -> str:
    """The line, as key=value with one space between. `rid` (a JSON text) is there when the body gave another name."""
    name = served.jobs[0].request_id if served.jobs else request_id
    ttft_s = served.ttft_s
    pairs = {
        "request_id": request_id,
        **({} if name == request_id else {"rid": json.dumps(name).replace(" ", "\\u0020")}),
        "route": route,
        "status": status,
        "prompt_tokens": served.num_prompt,
        "cached_tokens": served.num_cached,
        "output_tokens": served.num_output,
        "ttft_ms": "-" if ttft_s is None else f"{ttft_s * 1e3:.1f}",
        "total_ms": f"{total_s * 1e3:.1f}",
        "finish": _finish(served.timings, status),
    }
    return "request " + " ".join(f"{key}={value}" for key, value in pairs.items())


def _finish(timings: Sequence[Timing], status: int) -> str:
    """Reasons with their number: "length", "stop,length*2". A choice without one failed, or its client left."""
    otherwise = "abort" if status == CLIENT_LEFT else "error"
    counts = Counter([timing.finish_reason or otherwise for timing in timings] or [otherwise])
    return ",".join(reason if count == 1 else f"{reason}*{count}" for reason, count in counts.items())
