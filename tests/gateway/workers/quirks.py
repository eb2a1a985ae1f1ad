"""What goes wrong in a test worker, and how fast it is: by flags at the start, by POST /debug while it runs."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.gateway.workers.http import Answer

# Each name is a fault of one request, drawn at its rate.
STATUSES = ("400", "408", "429", "500", "502", "503")
CUTS = ("reset_before_head", "close_before_head", "hang_before_head", "garbage")
STREAM_CUTS = ("reset_after_head", "reset_mid_stream", "close_mid_stream", "hang_after_head", "hang_mid_stream")
FAULTS = (*STATUSES, *CUTS, *STREAM_CUTS)
FEEDS = ("ok", "500", "garbage", "slow", "missing", "hang")
SLOW_FEED_S = 3.0
FOREVER_S = 86400.0


@dataclass
class Quirks:
    """Settings that may change while the worker runs. Times in seconds, rates in [0, 1]."""

    ttft_s: float = 0.0
    token_s: float = 0.0
    answer_tokens: int = 16
    padding_bytes: int = 0  # that each token's text is longer
    faults: dict[str, float] = field(default_factory=dict)
    retry_after_s: float | None = 1.0
    load_feed: str = "ok"
    frozen_loads_s: float = 0.0  # a load report is served again for this long
    dead_ranks: list[int] = field(default_factory=list)
    is_healthy: bool = True

    def change(self, changes: dict[str, object]) -> None:
        """Set the named fields. Raises ValueError for an unknown name or value."""
        names = {one.name for one in dataclasses.fields(self)}
        for name, value in changes.items():
            if name not in names:
                raise ValueError(f"unknown setting {name}, known are {sorted(names)}")
            setattr(self, name, value)
        self.check()

    def check(self) -> None:
        """Raise ValueError for values that mean nothing."""
        unknown = [name for name in self.faults if name not in FAULTS]
        if unknown:
            raise ValueError(f"unknown faults {unknown}, known are {FAULTS}")
        if self.load_feed not in FEEDS:
            raise ValueError(f"unknown load feed {self.load_feed}, known are {FEEDS}")


class Dice:
    """Draws at most one fault for each request, seeded."""

    def __init__(self, quirks: Quirks, seed: int) -> None:
        self._quirks = quirks
        self._random = random.Random(seed)

    def draw(self) -> str | None:
        """The name of what goes wrong with this request, None when nothing does."""
        point = self._random.random()
        for name, rate in self._quirks.faults.items():
            if point < rate:
                return name
            point -= rate
        return None


async def cut_before_head(fault: str, answer: Answer) -> None:
    """Play one of CUTS, all of which leave the request without an answer."""
    if fault == "reset_before_head":
        answer.reset()
    elif fault == "close_before_head":
        answer.close()
    elif fault == "garbage":
        answer.raw(b"\x00\x01 this is not HTTP\r\n\r\n")
        answer.close()
    else:
        await asyncio.sleep(FOREVER_S)


async def cut_stream(fault: str, answer: Answer) -> None:
    """Play one of STREAM_CUTS at the place where it was called."""
    if fault.startswith("reset"):
        await asyncio.sleep(0.02)  # what was written before must arrive
        answer.reset()
    elif fault.startswith("close"):
        answer.close()
    else:
        await asyncio.sleep(FOREVER_S)


def parser(description: str) -> argparse.ArgumentParser:
    """The flags that every kind of worker has."""
    flags = argparse.ArgumentParser(description=description)
    flags.add_argument("--host", default="127.0.0.1")
    flags.add_argument("--port", type=int, default=0)
    flags.add_argument("--model", default="test-model")
    flags.add_argument("--dp-size", type=int, default=1)
    flags.add_argument("--bytes-per-token", type=float, default=4.0)
    flags.add_argument("--max-running", type=int, default=100_000, help="seats of a rank; further requests wait")
    flags.add_argument("--max-total-tokens", type=int, default=1_000_000, help="KV tokens of a rank")
    flags.add_argument("--listen-after-s", type=float, default=0.0)
    flags.add_argument("--ready-after-s", type=float, default=0.0, help="503 until then")
    flags.add_argument("--max-per-connection", type=int, help="close a connection after so many answers")
    flags.add_argument("--ttft-s", type=float, default=0.0)
    flags.add_argument("--token-s", type=float, default=0.0)
    flags.add_argument("--answer-tokens", type=int, default=16, help="longest answer, whatever max_tokens says")
    flags.add_argument("--fault", action="append", default=[], metavar="NAME=RATE", help=", ".join(FAULTS))
    flags.add_argument("--retry-after-s", type=float, default=1.0)
    flags.add_argument("--load-feed", default="ok", choices=FEEDS)
    flags.add_argument("--frozen-loads-s", type=float, default=0.0)
    flags.add_argument("--seed", type=int, default=0)
    return flags


def from_flags(flags: argparse.Namespace) -> Quirks:
    """The settings that the command line names."""
    faults = {name: float(rate) for name, _, rate in (one.partition("=") for one in flags.fault)}
    quirks = Quirks(
        ttft_s=flags.ttft_s,
        token_s=flags.token_s,
        answer_tokens=flags.answer_tokens,
        faults=faults,
        retry_after_s=flags.retry_after_s,
        load_feed=flags.load_feed,
        frozen_loads_s=flags.frozen_loads_s,
    )
    quirks.check()
    return quirks


def changes_of(body: bytes) -> dict[str, object]:
    """The settings in a POST /debug. Raises ValueError when the body is no JSON object."""
    changes = json.loads(body)
    if not isinstance(changes, dict):
        raise ValueError("the body must be a JSON object of settings")
    return changes


def retry_after(quirks: Quirks) -> Sequence[str]:
    """The Retry-After header, where one is set."""
    return () if quirks.retry_after_s is None else (f"retry-after: {quirks.retry_after_s:g}",)
