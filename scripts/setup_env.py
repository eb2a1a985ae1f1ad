"""Make .venv in the checkout: all that serving and testing need, CPU torch where there is no GPU.

Run by `make setup`; needs the standard library alone. What is installed is read from pyproject.toml, at the
versions of constraints.txt. It can be interrupted and repeated: packages left half installed are found and
installed again, and the stamp that says "done" is written last.
"""

from __future__ import annotations

import contextlib
import csv
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "equipoise-setup"
PYPROJECT = ROOT / "pyproject.toml"
CONSTRAINTS = ROOT / "scripts" / "constraints.txt"
# xgrammar names triton (1 GB, of use on a GPU alone) as a dependency: on a CPU its own are installed without it.
GPU_ONLY = "triton"


class SetupError(Exception):
    """A step failed; the message is what the user is told."""


def main() -> int:
    """Bring .venv up to date; 0 when it is, 2 with one line when it cannot be."""
    with PYPROJECT.open("rb") as lock:
        # Two at once (`make serve` beside `make test` on a fresh clone) would write over each other.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_current():
            return 0
        started = time.monotonic()
        try:
            install()
        except SetupError as error:
            print(f"setup: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("\nsetup: interrupted; run it again to go on", file=sys.stderr)
            return 130
        STAMP.write_text(fingerprint(), encoding="utf-8")
        print(f"setup: done in {time.monotonic() - started:.0f} s, {disk_mb(VENV):,} MB in {VENV.name}")
        return 0


def fingerprint() -> str:
    """What the environment depends on, as one hash: the lists of packages, this script, the checkout's place."""
    digest = hashlib.sha256(str(ROOT).encode())
    for path in (PYPROJECT, CONSTRAINTS, Path(__file__)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def is_current() -> bool:
    """True when the last setup ended well for just these inputs and its Python still runs."""
    if not STAMP.is_file() or STAMP.read_text(encoding="utf-8") != fingerprint():
        return False
    return runs(PYTHON) and not is_unlike_named(PYTHON)


def is_unlike_named(python: Path) -> bool:
    """True when the variable PYTHON names a Python, the one that runs this, and `python` is of another version."""
    if not os.environ.get("PYTHON"):
        return False
    asked = subprocess.run([python, "-c", "import sys; print(sys.version_info[:3])"], capture_output=True, text=True)
    return asked.stdout.strip() != str(sys.version_info[:3])


def install() -> None:
    """Every step, in order. Raises SetupError."""
    STAMP.unlink(missing_ok=True)
    make_venv()
    for name in remove_half_installed():
        print(f"setup: {name} was left half installed, it is installed again")
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    wanted = requirements(project)
    if has_gpu():
        step("PyTorch for the GPU", ["torch"])
        step("everything else", wanted)
    else:
        install_cpu_torch(wanted)
        xgrammar = [each for each in wanted if name_of(each) == "xgrammar"]
        step("everything else", [each for each in wanted if each not in xgrammar])
        step("xgrammar without its GPU dependency", ["--no-deps", *xgrammar])
        step("what xgrammar needs on a CPU", dependencies_of("xgrammar"))
    step("Equipoise itself, editable", ["--no-deps", "--editable", str(ROOT)])


def make_venv() -> None:
    """Create .venv, or create it anew when the one there does not work."""
    if runs(PYTHON, "-m", "pip", "--version") and not is_unlike_named(PYTHON):
        return
    print(f"setup: creating {VENV.name} with Python {sys.version.split()[0]}", flush=True)
    made = subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], capture_output=True, text=True)
    if made.returncode == 0:
        return
    # Debian's Python comes without ensurepip: whatever else can make a venv with pip in it will do.
    for command in (["uv", "venv", "--clear", "--seed", "--python", sys.executable], ["virtualenv", "--clear"]):
        if shutil.which(command[0]) and subprocess.run([*command, str(VENV)]).returncode == 0:
            return
    raise SetupError(
        f"{sys.executable} cannot make a virtual environment: {last_line(made.stdout + made.stderr)} "
        "(on Debian and Ubuntu: apt-get install python3-venv)"
    )


def remove_half_installed() -> list[str]:
    """Forget packages whose files are not as recorded, so that pip installs them again; their names."""
    broken = []
    for info in sorted(VENV.glob("lib/python*/site-packages/*.dist-info")):
        if not is_whole(info):
            broken.append(info.name.split("-")[0])
            shutil.rmtree(info)
    return broken


def is_whole(info: Path) -> bool:
    """True when every file in the RECORD of an installed package is there, with the size it should have."""
    record = info / "RECORD"
    if not record.is_file():
        return False
    with record.open(newline="", encoding="utf-8") as file:
        for path, _, size in csv.reader(file):
            installed = info.parent / path
            if path.endswith(".pyc"):
                continue
            if not installed.is_file() or (size and installed.stat().st_size != int(size)):
                return False
    return True


def requirements(project: dict[str, object]) -> list[str]:
    """Dependencies of the project and of all its extras, as pyproject.toml has them."""
    extras = project["optional-dependencies"]
    assert isinstance(extras, dict)
    listed = [*project["dependencies"], *(each for extra in extras.values() for each in extra)]  # type: ignore[misc]
    return [each for each in listed if name_of(each) != project["name"]]


def install_cpu_torch(wanted: list[str]) -> None:
    """Install the CPU build of torch: from a wheel at hand or a mirror, else with uv, which knows where it lies.

    Where neither can be reached, the plain build does as well; it is larger by the GPU's libraries."""
    version = tested_version("torch")
    installed = f"from importlib.metadata import version; assert version('torch').split('+')[0] == '{version}'"
    if runs(PYTHON, "-c", installed):
        return
    if sys.platform != "linux":
        # Elsewhere the plain wheel is the CPU's.
        step("PyTorch", [each for each in wanted if name_of(each) == "torch"])
        return
    print(f"setup: installing PyTorch {version} for the CPU", flush=True)
    if pip(["--no-deps", f"torch=={version}+cpu"], quiet=True).returncode == 0:
        return
    step("uv, to fetch the CPU build of PyTorch", ["uv"])
    fetched = subprocess.run(
        [PYTHON, "-m", "uv", "pip", "install", "--python", PYTHON, "--torch-backend=cpu", f"torch=={version}"]
    )
    if fetched.returncode:
        step("the plain PyTorch, some GB: its CPU build cannot be reached", [f"torch=={version}"])


def dependencies_of(name: str) -> list[str]:
    """What an installed package asks for, without what serves a GPU alone."""
    code = f"from importlib.metadata import requires; print(*requires('{name}'), sep='\\n')"
    asked = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    return [each for each in asked if "extra ==" not in each and name_of(each) != GPU_ONLY]


def step(what: str, arguments: list[str]) -> None:
    """Say what is installed and install it; raises SetupError when pip fails."""
    print(f"setup: installing {what}", flush=True)
    if pip(arguments).returncode:
        raise SetupError(f"pip could not install {what}, see above; run it again to go on")


def pip(arguments: list[str], *, quiet: bool = False) -> subprocess.CompletedProcess[bytes]:
    """Run `pip install` in .venv at the tested versions; to a terminal it shows its progress."""
    command = [PYTHON, "-m", "pip", "install", "--disable-pip-version-check", "--no-warn-conflicts", "-c", CONSTRAINTS]
    if quiet:
        return subprocess.run([*command, "-qqq", *arguments], capture_output=True)
    return subprocess.run([*command, *(() if sys.stdout.isatty() else ("-qq",)), *arguments])


def has_gpu() -> bool:
    """True when an NVIDIA GPU answers."""
    return bool(shutil.which("nvidia-smi")) and runs(Path("nvidia-smi"), "-L")


def runs(program: Path, *arguments: str) -> bool:
    """True when the program starts and ends with 0; Python on its own is asked for nothing."""
    with contextlib.suppress(OSError):
        return subprocess.run([program, *(arguments or ("-c", ""))], capture_output=True).returncode == 0
    return False


def tested_version(name: str) -> str:
    """The version of a package in constraints.txt."""
    for pinned, version in pins():
        if pinned == name:
            return version
    raise SetupError(f"{CONSTRAINTS.name} has no version of {name}")


def pins() -> Iterator[tuple[str, str]]:
    """Name and version of every line of constraints.txt."""
    for line in CONSTRAINTS.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, version = line.split("==")
            yield name, version


def name_of(requirement: str) -> str:
    """`torch>=2.11` -> `torch`, as package indexes write it."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    return re.sub(r"[-_.]+", "-", found.group() if found else requirement).lower()


def last_line(text: str) -> str:
    """The last line with words on it."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no reason given")


def disk_mb(folder: Path) -> int:
    """Megabytes that a folder takes on the disk."""
    return sum(os.lstat(path).st_blocks * 512 for path in folder.rglob("*") if not path.is_dir()) // 1_000_000


if __name__ == "__main__":
    sys.exit(main())
