"""What each token id spells, read from tokenizer.json: what a grammar has to know of a tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from tokenizers import Tokenizer

from equipoise.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Spelling = Literal["raw", "byte_fallback", "byte_level"]

_NUM_PROBES = 24


class _AddedToken(msgspec.Struct):
    id: int
    special: bool = False


class _TokenizerFile(msgspec.Struct):
    """The parts of tokenizer.json that tell how tokens are spelled."""

    model: dict[str, Any]
    added_tokens: list[_AddedToken] = []
    pre_tokenizer: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None


@dataclass(frozen=True)
class Vocabulary:
    """Token texts by id, as the tokenizer writes them, and how to read them.

    tokens: one entry per id below `vocab_size`; "" where no token has the id
    spelling: raw (the text itself); byte_fallback ("▁" is a space, "<0x0A>" a byte: sentencepiece);
        byte_level (every character stands for a byte: GPT-2 and its heirs)
    special_ids: tokens that stand for no text (markers of a chat template and the like)
    """

    tokens: tuple[str, ...]
    spelling: Spelling
    special_ids: frozenset[int]

    def without_specials(self) -> list[str]:
        """`tokens` with "" for the special ones."""
        return ["" if token_id in self.special_ids else text for token_id, text in enumerate(self.tokens)]


def read_vocabulary(tokenizer_dir: Path, vocab_size: int) -> Vocabulary:
    """Read `tokenizer_dir`/tokenizer.json; ids from `vocab_size` on are left out.

    Raises CheckpointError when the file is missing or broken, or when joined tokens do not spell the
    joined text (a word-piece decoder), for then no grammar over text can say which tokens are allowed."""
    path = tokenizer_dir / "tokenizer.json"
    try:
        content = path.read_bytes()
        parts = msgspec.json.decode(content, type=_TokenizerFile)
        tokenizer = Tokenizer.from_buffer(content)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except Exception as error:  # the tokenizers library raises plain Exception
        raise CheckpointError(f"{path}: not a tokenizer: {error}") from error
    tokens = [""] * vocab_size
    for text, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
        if token_id < vocab_size:
            tokens[token_id] = text
    special = frozenset(token.id for token in parts.added_tokens if token.special)
    spelling = _spelling_of(parts)
    if spelling == "raw":
        _check_spelling(tokenizer, tokens, special)
    return Vocabulary(tuple(tokens), spelling, special)


def _spelling_of(parts: _TokenizerFile) -> Spelling:
    kinds = {kind for node in (parts.decoder, parts.pre_tokenizer) for kind in _kinds(node)}
    if "ByteLevel" in kinds:
        return "byte_level"
    if kinds & {"ByteFallback", "Metaspace"} or parts.model.get("byte_fallback"):
        return "byte_fallback"
    return "raw"


def _kinds(node: dict[str, Any] | None) -> Iterator[str]:
    """Type names of a decoder or pre-tokenizer and of what it is a sequence of."""
    if node is None:
        return
    yield node["type"]
    for part in (*node.get("decoders", ()), *node.get("pretokenizers", ())):
        yield from _kinds(part)


def _check_spelling(tokenizer: Tokenizer, tokens: list[str], special: frozenset[int]) -> None:
    plain = [token_id for token_id, text in enumerate(tokens) if text and token_id not in special]
    probes = plain[:: max(1, len(plain) // _NUM_PROBES)]
    if tokenizer.decode(probes, skip_special_tokens=False) != "".join(tokens[token_id] for token_id in probes):
        raise CheckpointError("structured output: this tokenizer's decoder changes tokens when it joins them")
