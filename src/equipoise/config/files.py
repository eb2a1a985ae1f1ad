"""Files of settings and of workers: TOML, YAML or JSON by the name's ending."""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING, Any

import msgspec

from equipoise.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

FORMATS = {".toml": "TOML", ".yaml": "YAML", ".yml": "YAML", ".json": "JSON"}
"""What a file is by its ending; any other ending is TOML."""


def read_table(path: Path, field: str) -> dict[str, Any]:
    """The keys and values of the file. Raises ConfigError, on behalf of the setting `field`, when it cannot be read,
    is not what its ending says or has no keys at its top."""
    form = FORMATS.get(path.suffix.lower(), "TOML")
    try:
        found = _parse(path.read_bytes(), form)
    except OSError as error:
        raise ConfigError(f"{field}: {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{field}: {path} is not valid {form}: {' '.join(str(error).split())}") from None
    if found is None:
        return {}  # a YAML file of comments alone
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise ConfigError(f"{field}: {path}: keys and values are expected, as in max-queue: 100")
    return found


def _parse(raw: bytes, form: str) -> Any:
    if form == "TOML":
        return tomllib.loads(raw.decode())
    if form == "YAML":
        return msgspec.yaml.decode(raw)  # imports PyYAML now, and not before
    return msgspec.json.decode(raw)
