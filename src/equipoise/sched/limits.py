"""Limits: how many tokens of a prompt one step may compute. Sources are named by pull request."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from equipoise.request import Request
    from equipoise.sched.rules import Limit, LimitRule, StepView


def whole_prompts() -> LimitRule:
    """Chunked prefill off: all that is left of a prompt, or nothing."""

    def limit(request: Request, n: int) -> int:
        return n if request.num_computed + n >= request.num_known else 0

    return lambda _view: limit


def long_prefill_cap(cap: int, shared_tokens: int = 0) -> LimitRule:
    """At most `cap` tokens a chunk, so that one long prompt leaves room for others; void for a lone request.

    With `shared_tokens`, the budget of a step, the cap is at least its equal share per request that could
    prefill: few long prompts do not leave the step half empty."""

    def bind(view: StepView) -> Limit | None:
        if view.num_running + view.num_waiting <= 1:
            return None
        most = max(cap, shared_tokens // max(1, view.num_prefilling + view.num_waiting))
        return lambda _request, n: n if n < most else most

    return bind


def page_aligned(page_size: int) -> LimitRule:
    """A chunk that is not the prompt's last ends on a page boundary (vllm-project/vllm#19878).

    The boundary is counted from the start of the prompt: computed + chunk is a multiple of the page.
    A chunk that another limit cut before the next boundary runs as it is: that limit may say so for ever
    (an image that has no room yet begins there), and the chunk after it is aligned again."""

    def limit(request: Request, n: int) -> int:
        end = request.num_computed + n
        if end >= request.num_known:
            return n
        floored = end - end % page_size - request.num_computed
        return floored if floored > 0 else n

    return lambda _view: limit
