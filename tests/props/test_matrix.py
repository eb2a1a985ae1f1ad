"""Every pair of features, and larger sets, under random workloads: all invariants, and the tokens of a request alone.

What a feature changes is in FEATURES; pairs that are refused at start are listed in docs/composition.md.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from tests.props.workloads import Op, Settings, Spec, items_of, run_workload

from equipoise.clock import VirtualClock
from equipoise.errors import ConfigError

BASE = Settings(depth=0, prefix_cache=False, max_running=4, page_size=4, num_pages=12, max_step_tokens=48)
"""Pages are scarce: requests outgrow them together."""

FEATURES = {
    "depth 1": {"depth": 1},
    "depth 2": {"depth": 2},
    "chunking off": {"chunked": False},
    "small steps": {"max_step_tokens": 5},
    "one seat": {"max_running": 1},
    "long-prefill cap": {"long_prefill_cap": 3},
    "adaptive cap": {"long_prefill_cap": 3, "adaptive_prefill_cap": True},
    "page alignment": {"page_aligned": True},
    "prefix cache": {"prefix_cache": True},
    "cadence": {"prefill_interval": 3},
    "admission cap": {"admission_cap": 2},
    "min free seats": {"min_free_seats": 2},
    "balance margin 0": {"balance_margin": 0},
    "balance margin 1": {"balance_margin": 1},
    "prefill alignment": {"aligns_ranks": True},
    "rent or buy": {"rents": True},
    "priority": {"order": "priority"},
    "shortest-first": {"order": "shortest-first"},
    "longest-first": {"order": "longest-first"},
    "cheapest victims": {"preempt": "cheapest"},
    "bypass": {"max_bypass": 2},
    "watermark": {"watermark": 0.3},
    "no full reservation": {"reserve_full": False},
    "drafts": {"num_drafts": 2},
    "LoRA slots": {"max_loras": 1},
    "slots": {"num_slots": 1},
    "encoder": {"encoder": (3, 4)},
    "remote KV": {"has_remote": True},
    "queue of requests": {"max_waiting_reqs": 3},
    "queue of tokens": {"max_waiting_tokens": 20},
}
SCRIPTED = ("deadlines", "pauses", "flushes", "prompts in pieces")
"""Features that are in what happens, not in the settings."""

NAMES = [*FEATURES, *SCRIPTED]
WORKLOADS_PER_PAIR = 8
NUM_LARGER_SETS = 1500


def settings_of(names):
    """BASE with what `names` change; the later name wins where two change the same."""
    changes = {}
    for name in names:
        changes |= FEATURES.get(name, {})
    return replace(BASE, **changes)


def random_spec(rng, names, max_model_len):
    most = min(max_model_len - 1, 30 if rng.random() < 0.2 else 14)
    shared = rng.choice([0, 4, 8, 9])
    own = rng.randint(0 if shared else 1, max(1, most - shared))
    return Spec(
        family=int(rng.random() < 0.2),
        shared=min(shared, most),
        own=min(own, most - min(shared, most)),
        salt="tenant" if rng.random() < 0.1 else "",
        lora=rng.choice([None, "x", "y"]) if "LoRA slots" in names else None,
        max_tokens=rng.randint(1, 16),
        stop_ids=tuple(rng.sample(range(61), rng.choice([0, 3, 12]))),
        priority=rng.randint(0, 2),
        timeout_s=float(rng.randint(0, 15)) if "deadlines" in names and rng.random() < 0.4 else None,
        wants_prompt_logprobs=rng.random() < 0.05,
        needs_slot=rng.random() < 0.5,
        parks=rng.random() < 0.1,
        remote=rng.choice([0, 7, 12, 40]) if "remote KV" in names else 0,
        items=items_of(shared + own, (rng.randint(1, 3), rng.randint(0, 3)), rng.randint(0, 8)),
        num_late=rng.randint(1, 9) if "prompts in pieces" in names and rng.random() < 0.5 else 0,
    )


def random_script(rng, names, max_model_len, num_ops=36):
    weights = {"add": 9, "step": 10, "plan": 1, "collect": 1, "abort": 1, "wake": 1}
    weights |= {"pause": 1, "resume": 2} if "pauses" in names else {}
    weights |= {"flush": 2} if "flushes" in names else {}
    drawn = rng.choices(list(weights), list(weights.values()), k=num_ops)
    modes = {"pause": ["new", "all"], "flush": ["cached", "running"]}
    return [
        Op(
            name,
            spec=random_spec(rng, names, max_model_len) if name == "add" else None,
            which=rng.randrange(100),
            mode=rng.choice(modes.get(name, [""])),
        )
        for name in drawn
    ]


def is_refused(names):
    """Are these features refused at start?"""
    try:
        settings_of(names).build(VirtualClock())
    except ConfigError:
        return True
    return False


def run(names, seed):
    """One random workload; a failure tells how to run it again."""
    rng = random.Random(f"{names} {seed}")
    settings = settings_of(names)
    script = random_script(rng, names, settings.max_model_len)
    try:
        return run_workload(settings, script)
    except Exception as error:
        error.add_note(f"run({names!r}, {seed})")
        raise


def documented_refusals():
    """Pairs in the table of docs/composition.md."""
    page = (Path(__file__).parents[2] / "docs" / "composition.md").read_text()
    return {frozenset(pair) for pair in re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|", page, re.MULTILINE)}


def test_only_the_documented_pairs_are_refused():
    refused = {frozenset(pair) for pair in combinations(NAMES, 2) if is_refused(pair)}
    assert refused == documented_refusals()


def test_every_feature_runs_alone():
    for name in NAMES:
        for seed in range(WORKLOADS_PER_PAIR):
            run((name,), seed)


@pytest.mark.parametrize("name", NAMES)
def test_every_pair_of_features(name):
    for other in NAMES[NAMES.index(name) + 1 :]:
        if not is_refused((name, other)):
            for seed in range(WORKLOADS_PER_PAIR):
                run((name, other), seed)


def test_larger_sets_of_features():
    rng = random.Random(2026)
    done = 0
    while done < NUM_LARGER_SETS:
        names = tuple(sorted(rng.sample(NAMES, rng.randint(3, 12)), key=NAMES.index))
        if not is_refused(names):
            run(names, done)
            done += 1
