"""Cores and memory, from made-up trees of the kernel's files."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest
from tests.checkpoints import checkpoint
from tests.serving import serve

from equipoise.machine import cgroup_room_bytes, cpu_quota, free_ram_bytes, gpus, num_cores

if TYPE_CHECKING:
    from pathlib import Path

MEMINFO = "MemTotal:       2000 kB\nMemFree:         100 kB\nMemAvailable:   1000 kB\n"


def tree(root: Path, **files: str) -> Path:
    """A root with these files; `__` stands for a slash, `_` for a dot in the last part."""
    for key, text in files.items():
        folder, _, name = key.replace("__", "/").rpartition("/")
        file = root / folder / (name.replace("_", ".") if "sys/" in folder else name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


@pytest.mark.parametrize(
    ("text", "quota"),
    [("max 100000", None), ("200000 100000", 2.0), ("150000 100000", 1.5), ("5000 10000\n", 0.5), ("", None)],
)
def test_the_quota_is_time_by_period(tmp_path: Path, text: str, quota: float | None) -> None:
    assert cpu_quota(tree(tmp_path, proc__self__cgroup="0::/\n", sys__fs__cgroup__cpu_max=text)) == quota


def test_gpus_are_those_that_are_left_visible(tmp_path: Path) -> None:
    root = tree(tmp_path, dev__nvidia0="", dev__nvidia1="", dev__nvidiactl="")
    assert gpus(None, root) == ("0", "1")
    assert gpus("3, GPU-7", root) == ("3", "GPU-7")
    assert gpus("", root) == ()
    assert gpus(None, tmp_path / "none") == ()


def test_every_cgroup_above_counts(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        proc__self__cgroup="1:name=systemd:/x\n0::/a/b\n",
        sys__fs__cgroup__a__b__cpu_max="400000 100000",
        sys__fs__cgroup__a__cpu_max="300000 100000",
        sys__fs__cgroup__a__b__memory_max="1000",
        sys__fs__cgroup__a__b__memory_current="100",
        sys__fs__cgroup__a__memory_max="800",
        sys__fs__cgroup__a__memory_current="300",
        sys__fs__cgroup__x__memory_max="1",
        sys__fs__cgroup__x__memory_current="0",
    )
    assert cpu_quota(root) == 3.0
    assert cgroup_room_bytes(root) == 500


def test_a_path_from_outside_is_not_followed(tmp_path: Path) -> None:
    root = tree(tmp_path, proc__self__cgroup="0::/../other\n", sys__fs__cgroup__cpu_max="100000 100000")
    tree(tmp_path, sys__fs__other__cpu_max="1 100000")
    assert cpu_quota(root) == 1.0


def test_no_cgroup_is_no_limit(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) is None
    assert cgroup_room_bytes(tmp_path) is None
    assert free_ram_bytes(tmp_path) is None
    only_v1 = tree(tmp_path, proc__self__cgroup="4:memory:/x\n", sys__fs__cgroup__memory_max="5")
    assert cgroup_room_bytes(only_v1) is None


@pytest.mark.parametrize(
    ("most", "used", "inactive", "room"),
    [
        ("max", 100, 0, None),
        ("1000", 400, 0, 600),
        ("1000", 900, 500, 600),
        ("1000", 1000, 0, 0),
        ("1000", 10, 50, 1000),
    ],
)
def test_room_in_memory(tmp_path: Path, most: str, used: int, inactive: int, room: int | None) -> None:
    root = tree(
        tmp_path,
        proc__self__cgroup="0::/",
        sys__fs__cgroup__memory_max=most,
        sys__fs__cgroup__memory_current=str(used),
        sys__fs__cgroup__memory_stat=f"anon 7\nfile 9\ninactive_file {inactive}\nactive_file 3\n",
    )
    assert cgroup_room_bytes(root) == room


def test_free_ram_is_the_smaller_of_machine_and_cgroup(tmp_path: Path) -> None:
    root = tree(tmp_path, proc__meminfo=MEMINFO)
    assert free_ram_bytes(root) == 1000 * 1024
    tree(root, proc__self__cgroup="0::/", sys__fs__cgroup__memory_max="5000", sys__fs__cgroup__memory_current="0")
    assert free_ram_bytes(root) == 5000
    tree(root, sys__fs__cgroup__memory_max=str(10**12))
    assert free_ram_bytes(root) == 1000 * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="affinity is Linux's")
def test_cores_are_bounded_by_affinity_and_by_whole_cores_of_the_quota(tmp_path: Path) -> None:
    mine = os.sched_getaffinity(0)
    root = tree(tmp_path, proc__self__cgroup="0::/", sys__fs__cgroup__cpu_max="99900000 100000")
    assert num_cores(root) == len(mine)
    for quota, cores in (("190000", 1), ("50000", 1), ("200000", min(2, len(mine)))):
        tree(root, sys__fs__cgroup__cpu_max=f"{quota} 100000")
        assert num_cores(root) == cores
    os.sched_setaffinity(0, {min(mine)})
    try:
        assert num_cores(tmp_path / "none") == 1
    finally:
        os.sched_setaffinity(0, mine)


@pytest.mark.skipif(sys.platform != "linux", reason="affinity is Linux's")
def test_a_server_starts_no_more_threads_than_it_has_cores() -> None:
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(mine)})
    try:
        with serve("--model", str(checkpoint("llama")), "--num-pages", "8") as server:
            assert " and 1 threads; 8 KV pages" in server.read_log()
    finally:
        os.sched_setaffinity(0, mine)


def test_this_machine_has_something() -> None:
    assert num_cores() >= 1
    assert (free_ram_bytes() or 0) > 0
