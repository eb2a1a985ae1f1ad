"""What the files beside a tokenizer.json say: special tokens, ids that end a generation, chat templates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from equipoise.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

MAX_TOKEN_ID = 2**31 - 1

_File = TypeVar("_File", bound=msgspec.Struct)


class _TokenText(msgspec.Struct):
    content: str


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


class _TokenizerConfig(msgspec.Struct):
    """tokenizer_config.json, special_tokens_map.json and chat_template.json: what is read of them."""

    bos_token: str | _TokenText | None = None
    eos_token: str | _TokenText | None = None
    chat_template: str | list[_NamedTemplate] | None = None


class _ModelConfig(msgspec.Struct):
    """generation_config.json and config.json: what is read of them."""

    eos_token_id: int | list[int] | None = None
    text_config: dict[str, Any] | None = None


class FolderFacts(msgspec.Struct):
    """bos_token, eos_token: text or None. eos_ids: as the model's files list them. chat_templates: by name."""

    bos_token: str | None = None
    eos_token: str | None = None
    eos_ids: list[int] = []
    chat_templates: dict[str, str] = {}

    @classmethod
    def read(cls, folder: Path) -> FolderFacts:
        """Read `folder`; a file that is missing says nothing. Raises CheckpointError when one is broken."""
        own = _read_json(folder / "tokenizer_config.json", _TokenizerConfig)
        special = _read_json(folder / "special_tokens_map.json", _TokenizerConfig)
        return cls(
            bos_token=_text(own.bos_token) or _text(special.bos_token),
            eos_token=_text(own.eos_token) or _text(special.eos_token),
            eos_ids=_read_eos_ids(folder),
            chat_templates=_read_templates(folder, own),
        )


def one_line(error: Exception) -> str:
    """The error's message without line breaks."""
    return " ".join(str(error).split())


def _read_json(path: Path, kind: type[_File]) -> _File:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return kind()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: {one_line(error)}") from None


def _read_eos_ids(folder: Path) -> list[int]:
    """generation_config.json outranks config.json, as it does in transformers."""
    path = folder / "generation_config.json"
    found = _read_json(path, _ModelConfig)
    if found.eos_token_id is None:
        path = folder / "config.json"
        found = _read_json(path, _ModelConfig)
    if found.eos_token_id is None and found.text_config is not None:
        try:
            found = msgspec.convert(found.text_config, _ModelConfig)
        except msgspec.ValidationError as error:
            raise CheckpointError(f"{path}: text_config: {one_line(error)}") from None
    return _as_ids(found.eos_token_id, path)


def _as_ids(given: int | list[int] | None, path: Path) -> list[int]:
    """Token ids; -1 stands for "none" in some checkpoints."""
    each = [given] if isinstance(given, int) else given or []
    for token in each:
        if token > MAX_TOKEN_ID:
            raise CheckpointError(f"{path}: eos_token_id is {token}, it must be at most {MAX_TOKEN_ID}")
    return [token for token in each if token >= 0]


def _read_templates(folder: Path, own: _TokenizerConfig) -> dict[str, str]:
    """Files named .jinja outrank chat_template.json, which outranks tokenizer_config.json."""
    older = _read_json(folder / "chat_template.json", _TokenizerConfig)
    templates = _by_name(own.chat_template) | _by_name(older.chat_template)
    more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    main = folder / "chat_template.jinja"
    for path in [main, *more] if main.is_file() else more:
        templates["default" if path is main else path.stem] = _read_text(path)
    return templates


def _by_name(template: str | list[_NamedTemplate] | None) -> dict[str, str]:
    if template is None:
        return {}
    return {"default": template} if isinstance(template, str) else {each.name: each.template for each in template}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read ({one_line(error)})") from None


def _text(token: str | _TokenText | None) -> str | None:
    return token.content if isinstance(token, _TokenText) else token
