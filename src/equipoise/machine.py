"""What this process may use of the machine: cores, memory and GPUs, within affinity and the limits of its cgroup (v2).

A cgroup is bounded by every cgroup that it lies in, so each is asked, from the process's own up to the root.
`root` is where the files of the kernel are looked for.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path("/")


def num_cores(root: Path = ROOT) -> int:
    """Threads worth starting, at least 1: cores by affinity, and whole cores of the CPU quota.

    Half a core more is left out: threads that wait for each other stand still together once the quota is used up."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    quota = cpu_quota(root)
    return cores if quota is None else max(1, min(cores, int(quota)))


def free_ram_bytes(root: Path = ROOT) -> int | None:
    """Memory that this process can still take: of the machine, and within its cgroup. None when neither is known."""
    known = [room for room in (_available_bytes(root), cgroup_room_bytes(root)) if room is not None]
    return min(known, default=None)


def gpus(visible: str | None, root: Path = ROOT) -> tuple[str, ...]:
    """Names of the NVIDIA GPUs, as CUDA_VISIBLE_DEVICES takes them: those in `visible`, its value, else all."""
    if visible is not None:
        return tuple(name.strip() for name in visible.split(",") if name.strip())
    nodes = [path.name.removeprefix("nvidia") for path in (root / "dev").glob("nvidia[0-9]*")]
    return tuple(str(index) for index in range(len(nodes)))


def cpu_quota(root: Path = ROOT) -> float | None:
    """Cores' worth of time that the cgroup has, by `cpu.max` ("200000 100000" is 2.0). None without a limit."""
    quotas = []
    for folder in cgroups(root):
        quota, _, period = _text(folder / "cpu.max").partition(" ")
        if quota.isdigit() and period.isdigit() and int(period):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def cgroup_room_bytes(root: Path = ROOT) -> int | None:
    """`memory.max` less `memory.current`, 0 at least. None without a limit.

    File pages not used lately count as free, as in MemAvailable: those of a checkpoint that was just read."""
    rooms = []
    for folder in cgroups(root):
        most, used = _text(folder / "memory.max"), _text(folder / "memory.current")
        if most.isdigit() and used.isdigit():
            rooms.append(max(0, int(most) - max(0, int(used) - _inactive_file_bytes(folder))))
    return min(rooms, default=None)


def cgroups(root: Path = ROOT) -> Iterator[Path]:
    """Folders of this process's cgroup (v2) and of those that it lies in, as far as they can be seen from here."""
    top = root / "sys/fs/cgroup"
    lines = _text(root / "proc/self/cgroup").splitlines()
    own = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), None)
    if own is None:
        return
    path = PurePosixPath(own.lstrip("/"))
    if ".." not in path.parts:  # else it lies beside what is mounted here, and only the top is its own
        for part in (path, *path.parents):
            if part.name:
                yield top / part
    yield top


def _available_bytes(root: Path) -> int | None:
    for line in _text(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _inactive_file_bytes(folder: Path) -> int:
    for line in _text(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == "inactive_file" and value.isdigit():
            return int(value)
    return 0


def _text(file: Path) -> str:
    """What `file` says; "" when it is not there or not for us: the kernel has no such limit then."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""
