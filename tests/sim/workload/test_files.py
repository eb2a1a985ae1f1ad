"""Traces as files: columns by name, units, and errors that name the row."""

from __future__ import annotations

import gzip
from typing import TYPE_CHECKING

import pyarrow
import pytest
from pyarrow import parquet

from equipoise.errors import ConfigError
from equipoise.sim.workload.files import Columns, read_requests

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], Path]:
    def write_file(name: str, text: str) -> Path:
        path = tmp_path / name
        data = text.encode()
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return path

    return write_file


def test_azure_columns_and_seconds(write: Callable[[str, str], Path]) -> None:
    path = write("azure.csv.gz", "arrival_s,input_tokens,output_tokens\n0.0,374,44\n4.3146,396,109\n")
    first, second = read_requests(path)
    assert (first.arrival_s, first.prompt_len, first.output_len) == (0.0, 374, 44)
    assert (second.arrival_s, second.prompt_len, second.output_len) == (4.3146, 396, 109)
    assert second.pieces == ()


def test_mooncake_rows_have_milliseconds_and_pieces(write: Callable[[str, str], Path]) -> None:
    lines = [
        '{"timestamp": 27000, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2]}',
        '{"timestamp": 27500, "input_length": 7322, "output_length": 490, "hash_ids": [0, 14]}',
    ]
    first, second = read_requests(write("trace.jsonl", "\n".join(lines) + "\n"))
    assert (first.arrival_s, second.arrival_s) == (0.0, 0.5)
    assert (first.pieces, second.pieces) == ((0, 1, 2), (0, 14))


def test_own_names_and_units(write: Callable[[str, str], Path]) -> None:
    path = write("own.csv", "when,asked,said\n500,5,6\n750,7,8\n")
    rows = list(read_requests(path, Columns("when", "asked", "said", "ms")))
    assert [(row.arrival_s, row.prompt_len, row.output_len) for row in rows] == [(0.0, 5, 6), (0.25, 7, 8)]


def test_lengths_without_times_arrive_at_the_start(write: Callable[[str, str], Path]) -> None:
    rows = list(read_requests(write("lengths.csv", "input_tokens,output_tokens\n3772,54\n2015,0\n")))
    assert [(row.arrival_s, row.prompt_len, row.output_len) for row in rows] == [(0.0, 3772, 54), (0.0, 2015, 1)]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "a.csv",
            "arrival_s,input_tokens,output_tokens\n0,many,4\n",
            r"a\.csv:2: input_tokens: 'many' is not a number",
        ),
        ("a.csv", "arrival_s,input_tokens,output_tokens\n0,1,4\n0,1\n", r"a\.csv:3: output_tokens: None is not a"),
        ("a.csv", "arrival_s,input_tokens,output_tokens\n0,-5,4\n", r"a\.csv:2: input_tokens: -5 must be a whole"),
        ("a.csv", "arrival_s,input_tokens,output_tokens\n0,1.5,4\n", r"a\.csv:2: input_tokens: 1.5 must be a whole"),
        ("a.csv", "arrival_s,input_tokens,output_tokens\nnan,1,4\n", r"a\.csv:2: arrival_s: 'nan' is not a number"),
        (
            "a.csv",
            "arrival_s,output_tokens\n0,4\n",
            r"a\.csv:2: there is no column input_tokens, .*arrival_s.*prompt-column",
        ),
        ("a.csv", "arrival_s,input_tokens,output_tokens\n5,1,4\n3,1,4\n", r"a\.csv:3: arrives 2 s before the row"),
        ("a.jsonl", '{"timestamp": 0}\n[1]\n', r"a\.jsonl:1: there is no column"),
        ("a.jsonl", '{"timestamp": 0, "input_length"', r"a\.jsonl:1: not a JSON object"),
        ("a.jsonl", '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": "no"}', "hash_ids: 'no' must"),
        ("a.jsonl", '{"timestamp": 0, "input_length": 1%s}' % ("0" * 400), "input_length: 10+ is not a number"),
        (
            "a.csv",
            "arrival_s,input_tokens,output_tokens\n0,1,4\n1e9,1,4\n",
            r"a\.csv:3: arrives 1e\+09 s after the first",
        ),
        ("a.csv", "arrival_s,input_tokens,output_tokens\n-1e308,1,4\n1e308,1,4\n", r"a\.csv:3: arrives inf s after"),
        ("a.csv", "", r"a\.csv has no requests"),
        ("a.csv", "arrival_s,input_tokens,output_tokens\n", r"a\.csv has no requests"),
        ("a.txt", "", r"a\.txt must end in one of \.csv, \.jsonl, \.parquet"),
    ],
)
def test_rows_that_cannot_be_read_are_named(
    write: Callable[[str, str], Path], name: str, text: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        list(read_requests(write(name, text)))


@pytest.mark.parametrize("damage", [slice(0, 0), slice(0, 40), slice(4, None)])
def test_a_damaged_parquet_file_is_said(tmp_path: Path, damage: slice) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"input_tokens": [1, 2], "output_tokens": [3, 4]}), path)
    assert len(list(read_requests(path))) == 2
    path.write_bytes(path.read_bytes()[damage])
    with pytest.raises(ConfigError, match=r"a\.parquet is not a Parquet file"):
        list(read_requests(path))


@pytest.mark.parametrize("name", ["a.csv.gz", "a.jsonl.gz"])
def test_a_gzip_file_that_is_damaged_inside_is_said(write: Callable[[str, str], Path], name: str) -> None:
    path = write(name, "".join(f'{{"input_length": {length}, "output_length": 1}}\n' for length in range(1, 5000)))
    raw = path.read_bytes()
    path.write_bytes(raw[:15] + b"\xff" * 60 + raw[75:])
    with pytest.raises(ConfigError, match="Error -3 while decompressing"):
        list(read_requests(path))


def test_what_is_no_gzip_and_no_file_is_said(tmp_path: Path) -> None:
    broken = tmp_path / "a.csv.gz"
    broken.write_bytes(b"no gzip")
    with pytest.raises(ConfigError, match="is not a CSV file"):
        list(read_requests(broken))
    with pytest.raises(ConfigError, match="is not a file"):
        list(read_requests(tmp_path / "missing.csv"))


def test_a_long_file_is_read_as_it_goes(write: Callable[[str, str], Path]) -> None:
    rows = "".join(f"{second},10,20\n" for second in range(50_000))
    requests = read_requests(write("long.csv", "arrival_s,input_tokens,output_tokens\n" + rows + "broken,1,1\n"))
    assert next(requests).arrival_s == 0.0
    assert next(requests).arrival_s == 1.0
    requests.close()  # type: ignore[attr-defined]


def test_a_file_without_arrivals_is_refused_where_they_are_needed(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("time,input_tokens,output_tokens\n0,1,1\n")
    assert [request.arrival_s for request in read_requests(path)] == [0.0]
    with pytest.raises(ConfigError, match=r"no column of arrivals: there are time, .*arrival-column"):
        list(read_requests(path, needs_times=True))
