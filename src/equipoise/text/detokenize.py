"""Token by token to text, with stop strings.

A stream's text is the concatenation of what `push` and `finish` return. Text is held back only while it may
still change: the first bytes of a character, and a possible beginning of a stop string. Invalid UTF-8
becomes U+FFFD. Measured by benchmarks of the server: well under a microsecond per token without stop strings.
"""

from __future__ import annotations

from codecs import utf_8_decode
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from equipoise.request import SamplingParams
    from equipoise.text.pieces import TextTable
    from equipoise.text.tokenizer import Tokenizer

WINDOW_CONTEXT = 4
"""Tokens before the first output that `WindowText` decodes along, so that leading spaces come out right."""

PROMPT_TAIL = 16
"""Tokens of the prompt among which those WINDOW_CONTEXT are looked for: special ones may not count."""

WINDOW_PATIENCE = 8
"""Tokens that `WindowText` waits for an incomplete character before it lets U+FFFD through."""


class Detokenizer(Protocol):
    """Text of one stream. Not thread-safe."""

    @property
    def stopped_by(self) -> str | None:
        """The stop string that was found; from then on nothing may be pushed."""
        ...

    def push(self, token_id: int) -> str:
        """The next token; returns the text that can be shown now."""
        ...

    def finish(self) -> str:
        """No more tokens come; returns what was held back, incomplete characters as U+FFFD."""
        ...


def build_detokenizer(tokenizer: Tokenizer, params: SamplingParams, prompt_tail: list[int]) -> Detokenizer:
    """The detokenizer that `params` asks for. `prompt_tail`: the prompt's last tokens, PROMPT_TAIL of them will do."""
    table = tokenizer.text_table(params.skip_special_tokens)
    skip = params.skip_special_tokens
    text: Detokenizer = TableText(table) if table is not None else WindowText(tokenizer, skip, prompt_tail)
    if not params.stop:
        return text
    return StoppingText(text, params.stop, params.min_tokens, params.include_stop_str_in_output)


class TableText:
    """For decoders whose text is the concatenation of the tokens' bytes."""

    __slots__ = ("_table", "_tail")

    stopped_by: str | None = None

    def __init__(self, table: TextTable) -> None:
        self._table = table
        self._tail = b""  # the beginning of a character

    def push(self, token_id: int) -> str:
        piece = self._table[token_id]
        if self._tail:
            return self._join(piece.encode() if isinstance(piece, str) else piece)
        return piece if isinstance(piece, str) else self._join(piece)

    def _join(self, piece: bytes) -> str:
        data = self._tail + piece
        text, num_used = utf_8_decode(data, "replace", False)
        self._tail = data[num_used:]
        return text

    def finish(self) -> str:
        text = self._tail.decode("utf-8", "replace")
        self._tail = b""
        return text


class WindowText:
    """For every other decoder: decodes a short window of tokens with and without the new one."""

    __slots__ = ("_hidden", "_ids", "_shown", "_tokenizer")

    stopped_by: str | None = None

    def __init__(self, tokenizer: Tokenizer, skip_special: bool, prompt_tail: list[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden: frozenset[int] = tokenizer.special_ids if skip_special else frozenset()
        visible = [token_id for token_id in prompt_tail if self._is_visible(token_id)]
        self._ids = visible[-WINDOW_CONTEXT:]  # the window: context, then tokens without text
        self._shown = self._decode()  # text of the window's context

    def _is_visible(self, token_id: int) -> bool:
        return token_id < self._tokenizer.vocab_size and token_id not in self._hidden

    def push(self, token_id: int) -> str:
        if not self._is_visible(token_id):
            return ""
        self._ids.append(token_id)
        whole = self._decode()
        is_settled = whole.startswith(self._shown) and not whole.endswith("\ufffd")
        if not is_settled and len(self._ids) < WINDOW_CONTEXT + WINDOW_PATIENCE:
            return ""
        text = whole[len(self._shown) :]
        self._ids = self._ids[-WINDOW_CONTEXT:]
        self._shown = self._decode()
        return text

    def finish(self) -> str:
        return self._decode()[len(self._shown) :]

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=False)


class StoppingText:
    """Ends a stream's text at the first stop string that is completed, whatever tokens it spans.

    Of strings completed at the same character the longest counts. A string completed before the stream
    has `min_tokens` tokens is ordinary text."""

    __slots__ = ("_held", "_includes_stop", "_longest", "_min_tokens", "_num_tokens", "_stops", "_text", "stopped_by")

    def __init__(self, text: Detokenizer, stops: tuple[str, ...], min_tokens: int, includes_stop: bool) -> None:
        self._text = text
        self._stops = stops
        self._longest = max(map(len, stops))
        self._min_tokens = min_tokens
        self._includes_stop = includes_stop
        self._num_tokens = 0
        self._held = ""  # a suffix of the text so far that begins a stop string
        self.stopped_by: str | None = None

    def push(self, token_id: int) -> str:
        self._num_tokens += 1
        return self._release(self._text.push(token_id))

    def finish(self) -> str:
        text = self._release(self._text.finish())
        if self.stopped_by is None:
            text += self._held
        self._held = ""
        return text

    def _release(self, new: str) -> str:
        if not new:
            return ""
        text = self._held + new
        if self._num_tokens >= self._min_tokens:
            end = self._find(text, len(self._held))
            if self.stopped_by is not None:
                return text[:end] if self._includes_stop else text[: end - len(self.stopped_by)]
        keep = self._begins_stop(text)
        self._held = text[keep:]
        return text[:keep]

    def _find(self, text: str, num_old: int) -> int:
        """End of the stop string that is completed first, after the `num_old` characters seen before."""
        best = len(text) + 1
        for stop in self._stops:
            start = text.find(stop, max(0, num_old + 1 - len(stop)))
            end = start + len(stop)
            if start >= 0 and (end < best or (end == best and len(stop) > len(self.stopped_by or ""))):
                best, self.stopped_by = end, stop
        return best

    def _begins_stop(self, text: str) -> int:
        """Where the longest suffix starts that is a beginning of a stop string; len(text) when there is none."""
        first = len(text)
        for stop in self._stops:
            start = text.find(stop[0], max(0, len(text) + 1 - len(stop)), first)
            while start >= 0 and not stop.startswith(text[start:]):
                start = text.find(stop[0], start + 1, first)
            if start >= 0:
                first = start
        return first
