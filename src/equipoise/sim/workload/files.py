"""Recorded requests: CSV, JSON lines and Parquet, read row by row.

Columns are found by the names that public traces use: Azure's LLM inference traces, Mooncake's (FAST '25), Vidur's
processed ones. A file without times has requests that all arrive at the start: for closed loops.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from equipoise.config.checks import MAX_SECONDS
from equipoise.errors import ConfigError
from equipoise.sim.workload.request import SimRequest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path
    from typing import IO

Row = tuple[str, "Mapping[str, Any]"]
"""Where a row stands, for error messages, and what is in it."""

SECONDS = ("arrival_s", "arrival_time", "arrived_at")
MILLISECONDS = ("timestamp", "arrival_ms")
PROMPTS = ("input_tokens", "input_length", "prompt_len", "num_prefill_tokens", "ContextTokens", "input_toks")
OUTPUTS = ("output_tokens", "output_length", "output_len", "num_decode_tokens", "GeneratedTokens", "output_toks")
PIECES = ("hash_ids",)
MOST_TOKENS = 10_000_000
MOONCAKE_PIECE_LEN = 512
FORMATS = (".csv", ".jsonl", ".parquet")


class Columns(NamedTuple):
    """Which column holds what; None: found by name."""

    arrival: str | None = None
    prompt: str | None = None
    output: str | None = None
    arrival_unit: str | None = None


def read_requests(path: Path, columns: Columns | None = None, *, needs_times: bool = False) -> Iterator[SimRequest]:
    """The requests of a file in its order. The first arrives at 0 if the file has absolute times.

    needs_times: a file without a column of arrivals is an error; else all its requests arrive at 0.

    Raises ConfigError, naming file, row and column, when a row cannot be understood or comes before the one above."""
    columns = columns or Columns()
    if columns.arrival_unit not in (None, "s", "ms"):
        raise ConfigError(f"arrival-unit: {columns.arrival_unit!r} must be 's' or 'ms'")
    start_s: float | None = None
    last_s = 0.0
    for where, row in _rows(path):
        arrival_s = _arrival_s(where, row, columns, needs_times=needs_times)
        start_s = arrival_s if start_s is None else start_s
        arrival_s -= start_s
        if arrival_s < last_s:
            raise ConfigError(f"{where}: arrives {last_s - arrival_s:g} s before the row above: sort it by arrival")
        if arrival_s > MAX_SECONDS:
            raise ConfigError(
                f"{where}: arrives {arrival_s:g} s after the first row, at most {MAX_SECONDS:g} are allowed"
            )
        last_s = arrival_s
        yield SimRequest(
            arrival_s,
            _tokens(where, row, columns.prompt, PROMPTS),
            _tokens(where, row, columns.output, OUTPUTS),
            _pieces(where, row),
        )
    if start_s is None:
        raise ConfigError(f"workload: {path} has no requests")


def _rows(path: Path) -> Iterator[Row]:
    name = path.name.removesuffix(".gz")
    if not path.is_file():
        raise ConfigError(f"workload: {path} is not a file")
    if name.endswith(".parquet"):
        return _parquet_rows(path)
    if name.endswith(".jsonl"):
        return _json_rows(path)
    if name.endswith(".csv"):
        return _csv_rows(path)
    raise ConfigError(f"workload: {path} must end in one of {', '.join(FORMATS)}, or in .gz after that")


def _open(path: Path) -> IO[bytes]:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def _csv_rows(path: Path) -> Iterator[Row]:
    try:
        with _open(path) as file, io.TextIOWrapper(file, "utf-8", newline="") as text:
            for number, row in enumerate(csv.DictReader(text), 2):
                yield f"{path}:{number}", row
    except (UnicodeDecodeError, csv.Error, OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"workload: {path} is not a CSV file: {error}") from None


def _json_rows(path: Path) -> Iterator[Row]:
    decoder = msgspec.json.Decoder(dict[str, Any])
    try:
        with _open(path) as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{path}:{number}", _decoded(decoder, line, f"{path}:{number}")
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"workload: {path} is not a gzip file: {error}") from None


def _decoded(decoder: msgspec.json.Decoder[dict[str, Any]], line: bytes, where: str) -> dict[str, Any]:
    try:
        return decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: not a JSON object: {error}") from None


def _parquet_rows(path: Path) -> Iterator[Row]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise ConfigError(f"workload: {path}: Parquet needs pyarrow: install equipoise[sim]") from None
    number = 0
    try:
        for batch in parquet.ParquetFile(path).iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield f"{path}: row {number}", row
    except (OSError, ArrowException) as error:
        raise ConfigError(f"workload: {path} is not a Parquet file: {' '.join(str(error).split())}") from None


def _named(row: Mapping[str, Any], own: str | None, names: tuple[str, ...]) -> str | None:
    """The column that is there: the one that the user names, else the first of the usual ones."""
    return next((name for name in ((own,) if own else names) if name in row), None)


def _arrival_s(where: str, row: Mapping[str, Any], columns: Columns, *, needs_times: bool) -> float:
    name = _named(row, columns.arrival, SECONDS + MILLISECONDS)
    if name is None:
        if columns.arrival:
            raise ConfigError(f"{where}: there is no column {columns.arrival}: there are {', '.join(map(str, row))}")
        if needs_times:
            raise ConfigError(
                f"{where}: there is no column of arrivals: there are {', '.join(map(str, row))}; "
                "name it as workload.arrival-column, or give rate or concurrency"
            )
        return 0.0
    value = _number(where, name, row[name])
    unit = columns.arrival_unit or ("ms" if name in MILLISECONDS else "s")
    return value / 1e3 if unit == "ms" else value


def _tokens(where: str, row: Mapping[str, Any], own: str | None, names: tuple[str, ...]) -> int:
    """A length of at least 1: a trace's output of 0 tokens still took a step."""
    name = _named(row, own, names)
    if name is None:
        there = ", ".join(map(str, row))
        if own:
            raise ConfigError(f"{where}: there is no column {own}: there are {there}")
        setting = "prompt-column" if names is PROMPTS else "output-column"
        raise ConfigError(
            f"{where}: there is no column {', '.join(names[:-1])} or {names[-1]}: there are {there}; "
            f"name yours as workload.{setting}"
        )
    value = _number(where, name, row[name])
    if not 0 <= value <= MOST_TOKENS or value != int(value):
        raise ConfigError(f"{where}: {name}: {value:g} must be a whole number of tokens, 0 to {MOST_TOKENS:,}")
    return max(1, int(value))


def _number(where: str, name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"{where}: {name}: {value!r} is not a number")
    return number


def _pieces(where: str, row: Mapping[str, Any]) -> tuple[int, ...]:
    name = _named(row, None, PIECES)
    if name is None:
        return ()
    value = row[name]
    if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
        raise ConfigError(f"{where}: {name}: {value!r} must be a list of whole numbers")
    return tuple(map(hash, value))  # a whole number's is itself below 2**61, and one of 64 bits wherever it is larger
