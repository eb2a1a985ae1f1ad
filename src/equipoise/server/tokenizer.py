"""Text to token ids and back, over the `tokenizers` library, with what a model folder says about its tokens."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray


class Tokenizer:
    """A model's tokenizer. Thread-safe.

    vocab_size: highest token id + 1, added tokens included
    eos_ids: ids that end a generation, from generation_config.json, config.json and tokenizer_config.json
    bos_token, eos_token: their text, None when the model has none
    special_ids: ids that `skip_special_tokens` leaves out
    chat_templates: Jinja sources by name ("default", "tool_use", ...); empty when the model has none
    """

    vocab_size: int
    eos_ids: tuple[int, ...]
    bos_token: str | None
    eos_token: str | None
    special_ids: frozenset[int]
    chat_templates: dict[str, str]

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read `folder`. Raises CheckpointError, in one line, when a file is missing or broken."""
        raise NotImplementedError

    @property
    def chat_template(self) -> str | None:
        """The template named "default", or the only one there is; None when there is none."""
        raise NotImplementedError

    def encode(self, text: str, add_special_tokens: bool = True) -> NDArray[np.int32]:
        """Token ids of `text`: (n,) int32."""
        raise NotImplementedError

    async def encode_async(self, text: str, add_special_tokens: bool = True) -> NDArray[np.int32]:
        """As `encode`; a long text is encoded in a thread, so that the event loop goes on."""
        raise NotImplementedError

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; invalid UTF-8 becomes U+FFFD. Ids outside the vocabulary have no text."""
        raise NotImplementedError

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token stands for in running text; b"" for an id outside the vocabulary."""
        raise NotImplementedError
