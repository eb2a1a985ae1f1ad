"""Text to token ids and back, over the `tokenizers` library, with what a model folder says about its tokens."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import tokenizers

from equipoise.errors import CheckpointError, InvalidValueError
from equipoise.text.pieces import Pieces, TextTable, piece_kind
from equipoise.text.tokenizer_files import FolderFacts, one_line

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

LONG_TEXT_CHARS = 2048
"""Texts from here on are encoded in a thread: about a millisecond of work."""

ENCODE_THREADS = 2


class Tokenizer:
    """A model's tokenizer. Thread-safe.

    vocab_size: highest token id + 1, added tokens included
    eos_ids: ids that end a generation, from generation_config.json (else config.json) and tokenizer_config.json
    bos_token, eos_token: their text, None when the model has none
    special_ids: ids that `skip_special_tokens` leaves out
    chat_templates: Jinja sources by name ("default", "tool_use", ...); empty when the model has none
    """

    def __init__(self, backend: tokenizers.Tokenizer, decoder: dict[str, Any] | None, facts: FolderFacts) -> None:
        """`decoder`: the section of tokenizer.json with that name."""
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self.special_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self.bos_token = facts.bos_token
        self.eos_token = facts.eos_token
        self.eos_ids = _merge_eos(facts, backend)
        self.chat_templates = facts.chat_templates
        kind = piece_kind(decoder)
        self._pieces = None if kind is None else Pieces(backend, kind)

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read `folder`. Raises CheckpointError, in one line, when a file is missing or broken."""
        path = folder / "tokenizer.json"
        try:
            data = path.read_bytes()
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror}); a tokenizer.json is needed") from None
        try:
            backend = tokenizers.Tokenizer.from_buffer(data)
            decoder = msgspec.json.decode(data, type=_TokenizerFile).decoder
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{path}: not a tokenizer ({one_line(error)})") from None
        return cls(backend, decoder, FolderFacts.read(folder))

    @property
    def chat_template(self) -> str | None:
        """The template named "default", or the only one there is; None when there is none."""
        templates = self.chat_templates
        if "default" in templates or len(templates) != 1:
            return templates.get("default")
        return next(iter(templates.values()))

    def encode(self, text: str, add_special_tokens: bool = True) -> NDArray[np.int32]:
        """Token ids of `text`: (n,) int32. Raises InvalidValueError for a text that UTF-8 cannot express."""
        try:
            # Of the library's calls only the batched ones release the GIL; "fast" leaves out character offsets.
            (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except TypeError:  # a lone surrogate: JSON bodies cannot hold one, strings of a program can
            raise InvalidValueError("prompt: it is not valid Unicode text", "prompt") from None
        return np.array(encoding.ids, np.int32)

    async def encode_async(self, text: str, add_special_tokens: bool = True) -> NDArray[np.int32]:
        """As `encode`; a long text is encoded in a thread, so that the event loop goes on."""
        if len(text) < LONG_TEXT_CHARS:
            return self.encode(text, add_special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self.encode, text, add_special_tokens)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; invalid UTF-8 becomes U+FFFD. Ids outside the vocabulary have no text."""
        known = [int(token_id) for token_id in token_ids if 0 <= token_id < self.vocab_size]
        return self.backend.decode(known, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token stands for in running text; b"" for an id outside the vocabulary."""
        if self._pieces is not None:
            return self._pieces[token_id]
        return self.decode([token_id], skip_special_tokens=False).encode()

    def text_table(self, skip_special_tokens: bool) -> TextTable | None:
        """Token id -> text, shared by all streams; None for a decoder whose texts are not plain concatenation."""
        return self._visible_table if skip_special_tokens else self._full_table

    @cached_property
    def _visible_table(self) -> TextTable | None:
        return None if self._pieces is None else TextTable(self._pieces, self.special_ids)

    @cached_property
    def _full_table(self) -> TextTable | None:
        return None if self._pieces is None else TextTable(self._pieces, frozenset())

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(ENCODE_THREADS, thread_name_prefix="tokenize")


class _TokenizerFile(msgspec.Struct):
    decoder: dict[str, Any] | None = None


def _merge_eos(facts: FolderFacts, backend: tokenizers.Tokenizer) -> tuple[int, ...]:
    """The model's ids, then the tokenizer's own; each once."""
    own = backend.token_to_id(facts.eos_token) if facts.eos_token is not None else None
    return tuple(dict.fromkeys(facts.eos_ids + ([] if own is None else [own])))
