"""Record the versions in .venv as the tested ones: `make constraints` writes scripts/constraints.txt."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

# Tools that install, and what serves no purpose on a CPU, are left to the machine.
LEFT_OUT = {"equipoise", "pip", "uv", "wheel"}
HEADER = "# Versions the tests ran with. Written by `make constraints`, read by `make setup`.\n"


def main() -> None:
    """Names as indexes write them, versions without a build's suffix, sorted."""
    found = {
        re.sub(r"[-_.]+", "-", each.name).lower(): each.version.split("+")[0]
        for each in importlib.metadata.distributions()
    }
    lines = [f"{name}=={version}\n" for name, version in sorted(found.items()) if name not in LEFT_OUT]
    target = Path(__file__).parent / "constraints.txt"
    target.write_text(HEADER + "".join(lines), encoding="utf-8")
    print(f"{len(lines)} versions recorded in {target.name}")


if __name__ == "__main__":
    main()
