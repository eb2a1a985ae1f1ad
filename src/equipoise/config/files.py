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
MAX_FILE_BYTES = 64 * 2**20
MAX_DEPTH = 64
"""Of lists and mappings in each other, in YAML: the C code that reads it overflows the stack, and the process dies."""


def read_table(path: Path, field: str) -> dict[str, Any]:
    """The keys and values of the file. Raises ConfigError, on behalf of the setting `field`, when it cannot be read,
    is not what its ending says or has no keys at its top."""
    form = FORMATS.get(path.suffix.lower(), "TOML")
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
        if len(raw) > MAX_FILE_BYTES:
            raise ConfigError(f"{field}: {path} is over {MAX_FILE_BYTES >> 20} MiB")
        found = _parse(raw, form)
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
        return _parse_yaml(raw)
    return msgspec.json.decode(raw)


def _parse_yaml(raw: bytes) -> Any:
    import yaml  # type: ignore[import-untyped, unused-ignore]  # now, and not before: a file in another form does not pay for it

    depth = 0
    try:
        for event in yaml.parse(raw, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise RecursionError(f"it is nested more than {MAX_DEPTH} deep")
    except yaml.YAMLError as error:
        raise msgspec.DecodeError(str(error)) from None
    return msgspec.yaml.decode(raw)
