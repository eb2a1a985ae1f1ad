"""What each token id stands for in running text, read off the tokenizer's decoder.

Two families cover nearly every language model, and in both a text is the plain concatenation of its tokens'
bytes: byte-level BPE (GPT-2, Llama 3, Qwen) and sentencepiece with "▁" for space and <0x0A> for bytes
(Llama 2, Mistral, Gemma). Other decoders (WordPiece, ...) have no such table; see `detokenize.WindowText`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import tokenizers

PieceKind = Literal["byte_level", "sentencepiece"]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SENTENCEPIECE_STEPS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


def byte_level_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for.

    Printable Latin-1 characters stand for themselves; the other 68 bytes, in order, are U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def piece_kind(decoder: dict[str, Any] | None) -> PieceKind | None:
    """Which table fits the `decoder` section of a tokenizer.json; None when none does."""
    if decoder is None:
        return None
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    types = {step["type"] for step in steps}
    if types - {"Fuse"} == {"ByteLevel"}:
        return "byte_level"
    replaces = [step for step in steps if step["type"] == "Replace"]
    if types <= _SENTENCEPIECE_STEPS and ("Metaspace" in types or any(map(_is_space_mark, replaces))):
        return "sentencepiece" if all(map(_is_space_mark, replaces)) else None
    return None


def _is_space_mark(step: dict[str, Any]) -> bool:
    return bool(step["pattern"] == {"String": "▁"} and step["content"] == " ")


class Pieces:
    """The bytes of every token of one vocabulary."""

    def __init__(self, backend: tokenizers.Tokenizer, kind: PieceKind) -> None:
        self._backend = backend
        self._byte_of = byte_level_alphabet() if kind == "byte_level" else None

    def __getitem__(self, token_id: int) -> bytes:
        """Bytes of the token; b"" for an id that the vocabulary lacks."""
        token = self._backend.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            return b""
        if self._byte_of is not None:
            return self._byte_level(token, self._byte_of)
        match = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(match[1], 16)]) if match else token.replace("▁", " ").encode()

    @staticmethod
    def _byte_level(token: str, byte_of: dict[str, int]) -> bytes:
        try:
            return bytes([byte_of[char] for char in token])
        except KeyError:  # an added token, whose content is plain text
            return token.encode()


class TextTable(dict[int, "str | bytes"]):
    """Token id -> its text when its bytes are whole characters, else its bytes. Filled as tokens are met."""

    def __init__(self, pieces: Pieces, hidden: frozenset[int]) -> None:
        """`hidden`: ids that stand for no text at all."""
        super().__init__()
        self._pieces = pieces
        self._hidden = hidden

    def __missing__(self, token_id: int) -> str | bytes:
        piece = b"" if token_id in self._hidden else self._pieces[token_id]
        try:
            self[token_id] = entry = piece.decode()
        except UnicodeDecodeError:
            self[token_id] = piece
            return piece
        return entry
