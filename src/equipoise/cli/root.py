"""The commands, and what is common to them: settings from flags, environment and file; errors in one line."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, get_type_hints

from cyclopts import App, CycloptsError, UnknownOptionError, UnusedCliTokensError

from equipoise import __version__
from equipoise.cli import EXIT_FAILED, EXIT_OK, EXIT_WRONG
from equipoise.cli.experiment import experiment
from equipoise.cli.gateway import gateway
from equipoise.cli.help import TwoColumns
from equipoise.cli.serve import serve
from equipoise.cli.settings import (
    SECTIONS,
    check_environment,
    check_whole_numbers,
    command_of_others,
    flag_name,
    settings_sources,
)
from equipoise.cli.simulate import simulate
from equipoise.cli.sweep import sweep
from equipoise.errors import ConfigError, EquipoiseError

if TYPE_CHECKING:
    from collections.abc import Callable

ON_VIRTUAL_TIME: dict[str, Callable[..., int]] = {"simulate": simulate, "sweep": sweep, "experiment": experiment}
"""Commands whose settings come from flags and their own files alone."""
WORDS = {"serve": "DIR", "simulate": "SCENARIO", "experiment": "NAME", "sweep": "FILE"}
"""The words that are no flags, by command."""

EPILOGUE = (
    "Every flag of serve and gateway may also come from the environment (EQUIPOISE_MAX_RUNNING=64) or "
    "from --config FILE (TOML: max-running = 64, YAML: max-running: 64). Flags win over the environment, the "
    "environment wins over the file. Exit codes: 0 stopped, 1 failed while running, 2 wrong settings or checkpoint."
)
EPILOGUE_ON_VIRTUAL_TIME = "Exit codes: 0 done, 1 failed while running, 2 wrong settings."

app = App(
    name="equipoise",
    help="Serve large language models and keep data-parallel ranks in balance.",
    version=__version__,
    help_format="plaintext",
    help_formatter=TwoColumns(),
    help_epilogue=EPILOGUE,
    version_flags=["--version"],
    result_action="return_value",
)
app.command(serve)
app.command(gateway)
for on_virtual_time in ON_VIRTUAL_TIME.values():
    app.command(on_virtual_time, help_epilogue=EPILOGUE_ON_VIRTUAL_TIME)


@app.command
def version() -> int:
    """Print the version."""
    print(__version__)
    return EXIT_OK


def run(argv: list[str]) -> int:
    """Run a command; returns its exit code. Errors that users can mend are one line on stderr."""
    try:
        check_environment()
        app.config = settings_sources(argv)
        _check_flags(argv)
        result = app(argv, exit_on_error=False, print_error=False)
    except UnusedCliTokensError as error:
        words = " ".join(error.unused_tokens or ())
        only = next((word for command, word in WORDS.items() if command in argv), None)
        rest = "every setting is a flag" if only is None else f"{only} is the only word, every other setting is a flag"
        return _complain(f"{words}: not understood, {rest}", EXIT_WRONG)
    except UnknownOptionError as error:
        message = command_of_others(error.token.keyword or error.token.value, argv) or " ".join(str(error).split())
        return _complain(message, EXIT_WRONG)
    except CycloptsError as error:
        return _complain(" ".join(str(error).split()), EXIT_WRONG)
    except ConfigError as error:
        return _complain(str(error), EXIT_WRONG)
    except EquipoiseError as error:
        return _complain(str(error), EXIT_FAILED)
    except OSError as error:  # a disk that is full, a folder that is read-only
        if any(word in SECTIONS for word in argv):
            raise
        return _complain(" ".join(filter(None, (error.filename and f"{error.filename}:", error.strerror))), EXIT_FAILED)
    except KeyboardInterrupt:
        return 130
    return result if isinstance(result, int) else EXIT_OK


def _check_flags(argv: list[str]) -> None:
    command = ON_VIRTUAL_TIME.get(argv[0]) if argv else None
    if command is not None:
        hints = get_type_hints(command)
        check_whole_numbers(argv, frozenset(flag_name(name) for name in hints if hints[name] in (int, int | None)), {})


def _complain(message: str, code: int) -> int:
    print(f"equipoise: {message}", file=sys.stderr)
    return code
