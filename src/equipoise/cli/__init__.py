"""The command line: `equipoise COMMAND`. The only home of print.

Exit codes: 0 done, 1 failed while running, 2 wrong settings, checkpoint or arguments (one line on stderr).
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_WRONG = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` (the process's own when None) names; returns the exit code."""
    from equipoise.cli.root import run

    try:
        code = run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read stdout has left, as `head` does; nor may the flush at exit fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    return code
