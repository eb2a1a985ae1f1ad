"""Things from a user's own package, by name: a dotted path "package.module:attribute", or an entry point."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from equipoise.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable


def find_factory(kind: str, name: str, group: str) -> Callable[..., object]:
    """The function or class that `name` means, not called yet: "module:attribute", or an entry point of `group`.

    `kind` is what messages call such a thing. Raises ConfigError in one line."""
    try:
        if ":" in name:
            module, _, attribute = name.partition(":")
            factory = getattr(import_module(module), attribute)
        else:
            factory = entry_points(group=group)[name].load()
    except KeyError:
        known = ", ".join(plugin_names(group)) or "none"
        raise ConfigError(f"{kind}: {name!r} is neither module:function nor an installed {kind} ({known})") from None
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{kind}: {name!r} cannot be loaded: {error}") from None
    if not callable(factory):
        raise ConfigError(f"{kind}: {name!r} is not a function")
    return factory  # type: ignore[no-any-return]


def plugin_names(group: str) -> list[str]:
    """The installed entry points of `group`, sorted."""
    return sorted(entry_points(group=group).names)
