"""Things from a user's own package, by name: a dotted path "package.module:attribute", or an entry point."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING

from equipoise.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.metadata import EntryPoints


def find_factory(kind: str, name: str, group: str) -> Callable[..., object]:
    """The function or class that `name` means, not called yet: "module:attribute", or an entry point of `group`.

    A module is looked for among the installed ones, then in the folder where the process was started. `kind` is what
    messages call such a thing. Raises ConfigError in one line."""
    try:
        if ":" in name:
            module, _, attribute = name.partition(":")
            _look_here_too()
            factory = getattr(import_module(module), attribute)
        else:
            factory = _entry_points(group)[name].load()
    except KeyError:
        known = ", ".join(plugin_names(group)) or "none"
        raise ConfigError(f"{kind}: {name!r} is neither module:function nor an installed {kind} ({known})") from None
    except (ImportError, AttributeError, ValueError, OSError) as error:
        raise ConfigError(f"{kind}: {name!r} cannot be loaded: {error}") from None
    if not callable(factory):
        raise ConfigError(f"{kind}: {name!r} is not a function")
    return factory  # type: ignore[no-any-return]


def _look_here_too() -> None:
    """Let imports find what lies in the current folder: the `equipoise` command looks beside itself alone.

    Last, so that no file there replaces an installed module."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)


def plugin_names(group: str) -> list[str]:
    """The installed entry points of `group`, sorted."""
    return sorted(_entry_points(group).names)


def _entry_points(group: str) -> EntryPoints:
    from importlib.metadata import entry_points  # 2 MB and 50 ms that most processes can do without

    return entry_points(group=group)
