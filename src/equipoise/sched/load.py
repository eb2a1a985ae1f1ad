"""The load of a rank, as it is reported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from equipoise.sched.ledger import LoadCounters

if TYPE_CHECKING:
    from equipoise.kv.protocol import KVMemory
    from equipoise.sched.places import Places


def load_counters(places: Places, kv: KVMemory, max_running: int) -> LoadCounters:
    """The load of a rank now, in O(1)."""
    ledger = places.ledger
    return LoadCounters(
        num_running=places.num_running,
        num_waiting=ledger.num_waiting_reqs,
        num_waiting_tokens=ledger.num_waiting_tokens,
        num_waiting_uncached_tokens=ledger.num_waiting_uncached_tokens,
        num_prefilling_tokens=ledger.num_prefilling_tokens,
        num_inflight_rows=ledger.num_inflight_rows,
        num_expected_output_tokens=ledger.num_expected_output_tokens,
        num_reserved_tokens=ledger.num_reserved_pages * kv.page_size,
        num_sent_reqs=ledger.num_sent_reqs,
        num_sent_tokens=ledger.num_sent_tokens,
        num_used_tokens=(kv.num_pages - kv.num_free) * kv.page_size,
        num_total_tokens=kv.num_pages * kv.page_size,
        max_running=max_running,
    )
