"""Steps of ranks as a trace for ui.perfetto.dev or chrome://tracing: JSON, the array form of the Trace Event Format.

    process = worker, thread = rank    a slice "X" for each step, and one for its wait for the slowest rank
    counters "C" of each rank          requests running and waiting, KV tokens
    nested async slices "b" "e"        a request: queued, prefill, decode

Events are written as they come, so a trace of a million steps needs no memory, and a file that was cut short opens too:
the format lets the closing bracket be missing. Source: "Trace Event Format", the Chromium project's document.
"""

from __future__ import annotations

from collections import deque
from io import StringIO
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import IO

KEPT_LINES = 4096
IDLE_NS = 10_000_000
"""Without a step for so long a rank runs nothing."""


class StepSpan(NamedTuple):
    """A step of a rank. `wait_s`: the last part of it, in which the rank had finished and waited for the slowest.

    kv_tokens: of the engine, those in use; of a simulation, those that decodes read; -1 where it is not known
    num_waiting: requests; -1 where it is not known
    held_by: the rule that kept the head of the queue from being admitted, "" when none did"""

    begins_s: float
    ends_s: float
    wait_s: float
    prefill_tokens: int
    num_chunks: int
    decode_rows: int
    kv_tokens: int
    num_waiting: int = -1
    held_by: str = ""


StepTuple: TypeAlias = tuple[float, float, float, int, int, int, int, int, str]
"""A StepSpan that costs a sixth as much to make."""


class StepRing:
    """The last `num_steps` steps of a rank."""

    def __init__(self, num_steps: int) -> None:
        self._ring: deque[StepTuple] = deque(maxlen=num_steps)
        self.keep: Callable[[StepTuple], None] = self._ring.append

    def steps(self) -> list[StepSpan]:
        """Oldest first."""
        return [StepSpan(*step) for step in self._ring]


class _Track:
    """What was written last of a rank."""

    __slots__ = ("ends_ns", "kv_tokens", "name", "num_running", "num_waiting")

    def __init__(self, name: str) -> None:
        self.name = name
        self.ends_ns = 0
        self.num_running = 0
        self.num_waiting = 0
        self.kv_tokens = 0


class TraceWriter:
    """Writes events to `file`; second `zero_s` is the trace's zero. Steps of a rank come in the order of their ends.

    Close it: that ends the counters and the array. The file stays open."""

    def __init__(self, file: IO[str], zero_s: float = 0.0) -> None:
        self._file = file
        self._zero_s = zero_s
        self._tracks: dict[tuple[int, int], _Track] = {}
        self._lines: list[str] = []
        self._separator = "[\n"

    def name_worker(self, worker: int, name: str) -> None:
        """What the process is called."""
        self._add(f'{{"ph":"M","pid":{worker},"tid":0,"name":"process_name","args":{{"name":{_text(name)}}}}}')
        self._add(f'{{"ph":"M","pid":{worker},"tid":0,"name":"process_sort_index","args":{{"sort_index":{worker}}}}}')

    def name_rank(self, worker: int, rank: int, name: str) -> None:
        """What the thread is called."""
        self._tracks[worker, rank] = _Track(name)
        named = f'"pid":{worker},"tid":{rank},'
        self._add(f'{{"ph":"M",{named}"name":"thread_name","args":{{"name":{_text(name)}}}}}')
        self._add(f'{{"ph":"M",{named}"name":"thread_sort_index","args":{{"sort_index":{rank}}}}}')

    def step(self, worker: int, rank: int, step: StepSpan) -> None:
        """A step of a rank that has a name."""
        track = self._tracks[worker, rank]
        # Steps follow each other: what two roundings made of the same moment must not overlap.
        begins_ns = max(self._ns(step.begins_s), track.ends_ns)
        ends_ns = max(self._ns(step.ends_s), begins_ns)
        waits_ns = min(max(begins_ns, ends_ns - round(step.wait_s * 1e9)), ends_ns)
        self._count(worker, rank, track, begins_ns, step)
        name = "decode" if not step.num_chunks else "prefill + decode" if step.decode_rows else "prefill"
        kv_tokens = f',"kv_tokens":{step.kv_tokens}' if step.kv_tokens >= 0 else ""
        held_by = f',"held_by":{_text(step.held_by)}' if step.held_by else ""
        named = f'"pid":{worker},"tid":{rank},"cat":"step"'
        self._add(
            f'{{"ph":"X",{named},"name":"{name}","ts":{_us(begins_ns)},"dur":{_us(waits_ns - begins_ns)},'
            f'"args":{{"prefill_tokens":{step.prefill_tokens},"chunks":{step.num_chunks},'
            f'"decode_rows":{step.decode_rows}{kv_tokens}{held_by}}}}}'
        )
        if ends_ns > waits_ns:
            self._add(
                f'{{"ph":"X",{named},"name":"wait for the slowest",'
                f'"ts":{_us(waits_ns)},"dur":{_us(ends_ns - waits_ns)}}}'
            )
        track.ends_ns = ends_ns

    def _count(self, worker: int, rank: int, track: _Track, begins_ns: int, step: StepSpan) -> None:
        """Counters, where they change."""
        if begins_ns > track.ends_ns + IDLE_NS and track.num_running:
            self._counter(worker, rank, f"{track.name} running", track.ends_ns, 0)
            track.num_running = 0
        running = step.decode_rows + step.num_chunks
        if running != track.num_running:
            self._counter(worker, rank, f"{track.name} running", begins_ns, running)
            track.num_running = running
        if step.num_waiting >= 0 and step.num_waiting != track.num_waiting:
            self._counter(worker, rank, f"{track.name} waiting", begins_ns, step.num_waiting)
            track.num_waiting = step.num_waiting
        if step.kv_tokens >= 0 and step.kv_tokens != track.kv_tokens:
            self._counter(worker, rank, f"{track.name} KV tokens", begins_ns, step.kv_tokens)
            track.kv_tokens = step.kv_tokens

    def waiting(self, worker: int, rank: int, at_s: float, num_waiting: int) -> None:
        """So many requests wait for a rank from now on, where steps do not say it."""
        self._counter(worker, rank, f"{self._tracks[worker, rank].name} waiting", self._ns(at_s), num_waiting)

    def request(self, worker: int, number: int, args: Mapping[str, int], stages: Iterable[tuple[str, float]]) -> None:
        """A request of a worker: the names of its stages and when each began; the last of them is its end."""
        named = f'"cat":"request","id":{number},"pid":{worker},"tid":0'
        [(_, begins_s), *rest] = stages = list(stages)
        _, ends_s = stages[-1]
        self._add(
            f'{{"ph":"b",{named},"name":"request {number}","ts":{_us(self._ns(begins_s))},'
            f'"args":{msgspec.json.encode(args).decode()}}}'
        )
        for (name, since_s), (_, until_s) in zip(stages, rest, strict=False):
            self._add(f'{{"ph":"b",{named},"name":{_text(name)},"ts":{_us(self._ns(since_s))}}}')
            self._add(f'{{"ph":"e",{named},"name":{_text(name)},"ts":{_us(self._ns(until_s))}}}')
        self._add(f'{{"ph":"e",{named},"name":"request {number}","ts":{_us(self._ns(ends_s))}}}')

    def close(self) -> None:
        """Nothing runs any more; ends the array."""
        for (worker, rank), track in self._tracks.items():
            if track.num_running:
                self._counter(worker, rank, f"{track.name} running", track.ends_ns, 0)
        self._flush()
        self._file.write("[]\n" if self._separator == "[\n" else "\n]\n")

    def _counter(self, worker: int, rank: int, name: str, at_ns: int, value: int) -> None:
        named = f'"pid":{worker},"tid":{rank},"name":{_text(name)}'
        self._add(f'{{"ph":"C",{named},"ts":{_us(at_ns)},"args":{{"value":{value}}}}}')

    def _ns(self, time_s: float) -> int:
        return max(round((time_s - self._zero_s) * 1e9), 0)

    def _add(self, line: str) -> None:
        self._lines.append(line)
        if len(self._lines) >= KEPT_LINES:
            self._flush()

    def _flush(self) -> None:
        if self._lines:
            self._file.write(self._separator + ",\n".join(self._lines))
            self._lines, self._separator = [], ",\n"


def trace_of(worker: str, ranks: Mapping[int, Sequence[StepSpan]]) -> str:
    """The trace of one worker; its zero is when the first of these steps began."""
    zero_s = min((steps[0].begins_s for steps in ranks.values() if steps), default=0.0)
    file = StringIO()
    writer = TraceWriter(file, zero_s)
    writer.name_worker(0, worker)
    for rank, steps in ranks.items():
        writer.name_rank(0, rank, f"rank {rank}")
        for step in steps:
            writer.step(0, rank, step)
    writer.close()
    return file.getvalue()


def _us(ns: int) -> str:
    """Microseconds, to the nanosecond."""
    return f"{ns // 1000}.{ns % 1000:03d}"


def _text(text: str) -> str:
    return msgspec.json.encode(text).decode()
