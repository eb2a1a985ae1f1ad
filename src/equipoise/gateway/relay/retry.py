"""Whether a failed request is tried again, and after how long. Pure but for a seeded generator.

Only ever before a byte of an answer reached the client. What the worker refused as the request's own fault (other
4xx) is never tried again, nor what ran into a limit of time once it was under way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from random import Random

    from equipoise.gateway.transport import Header, Phase

RETRIED_PHASES: frozenset[Phase] = frozenset(("connect", "send", "worker", "gateway"))
_NEVER = frozenset((501, 505))


@dataclass(frozen=True, slots=True)
class RetryRules:
    """max_retries: further tries. delay_s: before the second try, doubled from try to try up to max_delay_s.
    jitter: share (0 to 1) by which a delay is shortened at random. max_total_s: after so many seconds from its first
    try a request is not tried again."""

    max_retries: int = 3
    delay_s: float = 0.05
    max_delay_s: float = 2.0
    jitter: float = 0.5
    max_total_s: float = 60.0


class Retries:
    """The rules, applied."""

    def __init__(self, rules: RetryRules, random: Random) -> None:
        self._rules = rules
        self._random = random

    def delay_s(self, num_tries: int, elapsed_s: float, retry_after_s: float | None = None) -> float | None:
        """Seconds to wait after the `num_tries`-th try, `elapsed_s` after the first one began; None: give up.

        `retry_after_s`: what the worker asked for; more than max_delay_s is left to the client to wait."""
        rules = self._rules
        if num_tries > rules.max_retries:
            return None
        delay_s = min(rules.max_delay_s, rules.delay_s * 2.0 ** (num_tries - 1))
        delay_s *= 1 - rules.jitter * self._random.random()
        if retry_after_s is not None:
            if retry_after_s > rules.max_delay_s:
                return None
            delay_s = max(delay_s, retry_after_s)
        return None if elapsed_s + delay_s > rules.max_total_s else delay_s


def is_retried(status: int) -> bool:
    """Whether an answer with `status` is the worker's fault of the moment, so that another may do better."""
    return status == 429 or status == 408 or (status >= 500 and status not in _NEVER)


def retry_after_s(headers: list[Header]) -> float | None:
    """What Retry-After asks for in seconds, None where it is missing or a date."""
    for name, value in headers:
        if name.lower() == b"retry-after" and value.strip().isdigit():
            return float(value)
    return None
