"""The only reader of scheduler settings: which rules a scheduler has. A disabled feature is absent."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

from equipoise.config.engine import ALIGNMENT_DELAY_S, ALIGNMENT_PASSES, BALANCE_MARGIN, RENT_OR_BUY_DELAY_S
from equipoise.errors import ConfigError
from equipoise.kv.paged import PagedKV
from equipoise.sched.drafts import NgramDrafter
from equipoise.sched.explain import DecisionTrace
from equipoise.sched.extend import Extension, load_extension
from equipoise.sched.gates import PrefillAlignment, admission_cap, balance, min_free_seats, prefill_cadence
from equipoise.sched.limits import long_prefill_cap, page_aligned, whole_prompts
from equipoise.sched.orders import cheapest, fcfs, last_in, longest_first, outranks, priority, shortest_first
from equipoise.sched.rent_or_buy import RentOrBuy
from equipoise.sched.resources import TokenBudget
from equipoise.sched.roles import MIXED
from equipoise.sched.rules import Rules
from equipoise.sched.scheduler import Scheduler

if TYPE_CHECKING:
    from equipoise.clock import Clock
    from equipoise.config import CacheConfig, SchedulerConfig
    from equipoise.exec.protocol import ExecutorInfo
    from equipoise.sched.roles import Role
    from equipoise.sched.rules import Gate, LastingGate, LimitRule, Order
    from equipoise.sched.shared import GroupGates


def build_scheduler(
    config: SchedulerConfig,
    cache: CacheConfig,
    info: ExecutorInfo,
    clock: Clock,
    extension: Extension | None = None,
    role: Role = MIXED,
    group_gates: GroupGates | None = None,
) -> Scheduler:
    """A scheduler for one rank; `extension` adds rules that settings do not name. That of a decode rank must have a
    `remote` which brings whole prompts. `group_gates`: what ranks of a group share that live in one process.

    Raises ConfigError for settings that cannot work together."""
    page_size = info.page_size
    # A request's last token is drawn but never computed: it needs no page.
    max_model_len = min(info.max_model_len, info.num_pages * page_size + 1)
    if max_model_len < 2:
        raise ConfigError(f"num-pages: {info.num_pages} pages of {page_size} tokens hold no prompt and its output")
    if not config.chunked_prefill and config.max_step_tokens < max_model_len:
        raise ConfigError(
            f"max-step-tokens: {config.max_step_tokens} is less than the model's length {max_model_len}, "
            "which must fit one step when chunked prefill is off"
        )
    # A prompt that runs whole has no boundary to align: charging it by pages could only keep it out for ever.
    aligned = config.page_aligned_prefill and config.chunked_prefill and config.max_step_tokens >= page_size
    trace = DecisionTrace(config.trace_steps) if config.trace_steps else None
    extra = (extension or Extension()).and_then(Extension(observers=[trace] if trace else []))
    added = [load_extension(name, config, info) for name in config.rules]
    return Scheduler(
        kv=PagedKV(info.num_pages, page_size, prefix_cache=cache.prefix_cache),
        clock=clock,
        budget=TokenBudget(config.max_step_tokens, unit=page_size if aligned else 1),
        rules=_rules(config, reduce(Extension.and_then, added, extra), page_size, group_gates, aligned=aligned),
        max_running=config.max_running,
        max_model_len=max_model_len,
        depth=config.depth,
        reserve_full_prompt=config.reserve_full_prompt,
        watermark_pages=int(config.watermark * info.num_pages),
        max_bypass=config.max_bypass,
        max_waiting_reqs=config.max_waiting_reqs,
        max_waiting_tokens=config.max_waiting_tokens,
        trace=trace,
        role=role,
    )


def _rules(
    config: SchedulerConfig, added: Extension, page_size: int, group_gates: GroupGates | None, *, aligned: bool
) -> Rules:
    order = added.order or _order(config)
    victim_order = cheapest if config.preempt == "cheapest" else last_in(order)
    return Rules(
        order=order,
        victim_order=added.victim_order or victim_order,
        outranks=added.outranks or (outranks if config.order == "priority" else None),
        limits=[
            *_caps(config, page_size if aligned else 1),
            *added.limits,
            *_shapes(config, page_size, aligned=aligned),
        ],
        prefill_gates=[*_prefill_gates(config, group_gates), *added.prefill_gates],
        admission_gates=[*_admission_gates(config, group_gates), *added.admission_gates],
        resources=added.resources,
        drafter=added.drafter or (NgramDrafter(config.num_drafts) if config.num_drafts else None),
        remote=added.remote,
        observers=added.observers,
    )


def _caps(config: SchedulerConfig, unit: int) -> list[LimitRule]:
    """`unit`: chunks are aligned to so many tokens. Prompts that run whole have nothing to cap."""
    if not config.chunked_prefill or not config.long_prefill_cap:
        return []
    # A cap below a page would floor every chunk to nothing: it is rounded up to one page.
    cap = max(config.long_prefill_cap, unit)
    return [long_prefill_cap(cap, config.max_step_tokens if config.adaptive_prefill_cap else 0)]


def _shapes(config: SchedulerConfig, page_size: int, *, aligned: bool) -> list[LimitRule]:
    """What a chunk must be like: asked after all that cut it, so that the answer stands."""
    if not config.chunked_prefill:
        return [whole_prompts()]
    return [page_aligned(page_size)] if aligned else []


def _prefill_gates(config: SchedulerConfig, group_gates: GroupGates | None) -> list[Gate]:
    gates: list[Gate] = []
    if config.prefill_interval > 1:
        gates.append(prefill_cadence(config.prefill_interval))
    if config.prefill_alignment:
        passes, delay_s = config.prefill_alignment_passes, config.prefill_alignment_delay_s
        max_passes = ALIGNMENT_PASSES if passes is None else passes
        max_delay_s = ALIGNMENT_DELAY_S if delay_s is None else delay_s
        num_open = config.prefill_interval
        alignment = PrefillAlignment(max_passes, max_delay_s, num_open=num_open)
        gates.append(_over_ranks("prefill_alignment", alignment, group_gates))
    return gates


def _admission_gates(config: SchedulerConfig, group_gates: GroupGates | None) -> list[Gate]:
    gates: list[Gate] = []
    if config.admission_cap is not None:
        gates.append(admission_cap(config.admission_cap))
    if config.min_free_seats > 1:
        gates.append(min_free_seats(config.min_free_seats))
    if config.balance:
        margin = BALANCE_MARGIN if config.balance_margin is None else config.balance_margin
        gates.append(balance(config.max_running, margin))
    if config.rent_or_buy:
        delay_s = config.rent_or_buy_max_delay_s
        max_delay_s = RENT_OR_BUY_DELAY_S if delay_s is None else delay_s
        gates.append(_over_ranks("rent_or_buy", RentOrBuy(config.max_step_tokens, max_delay_s), group_gates))
    return gates


def _over_ranks(name: str, gate: LastingGate, group_gates: GroupGates | None) -> Gate:
    """A gate that answers by the states of all ranks alone: `gate`, or the one that the group has already."""
    return gate if group_gates is None else group_gates.shared(name, gate)


def _order(config: SchedulerConfig) -> Order:
    orders = {
        "fcfs": fcfs,
        "priority": priority,
        "shortest-first": shortest_first(config.ageing_s),
        "longest-first": longest_first,
    }
    return orders[config.order]
