"""Log probabilities in the shapes that clients know: OpenAI's two, vLLM's prompt_logprobs, SGLang's tuples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from equipoise.exec.protocol import TokenLogprobs
    from equipoise.text.tokenizer import Tokenizer

LOWEST = -9999.0
"""Stands for minus infinity, which JSON lacks."""


def finite(logprob: float) -> float:
    """`logprob`, or LOWEST when it is no finite number."""
    return logprob if logprob > LOWEST else LOWEST


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """Text of one token; bytes of a part of a character become U+FFFD."""
    return tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def chat_logprobs(tokenizer: Tokenizer, rows: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """`logprobs` of a chat choice."""
    return {"content": [_chat_row(tokenizer, row) for row in rows], "refusal": None}


def _chat_row(tokenizer: Tokenizer, row: TokenLogprobs) -> dict[str, Any]:
    top = zip(row.top_ids, row.top_logprobs, strict=True)
    return {
        **_chat_token(tokenizer, row.token_id, row.logprob),
        "top_logprobs": [_chat_token(tokenizer, token_id, logprob) for token_id, logprob in top],
    }


def _chat_token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token_id)
    return {"token": raw.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(raw)}


class CompletionLogprobs:
    """`logprobs` of a completion choice, over as many calls as its text comes in: offsets go on."""

    def __init__(self, tokenizer: Tokenizer, with_top: bool) -> None:
        self._tokenizer = tokenizer
        self._with_top = with_top
        self._offset = 0

    def rows(self, rows: Sequence[TokenLogprobs], first_id: int | None = None) -> dict[str, Any]:
        """The next tokens. `first_id` goes before them: a prompt's first token, which has no logprob."""
        tokens: list[str] = []
        logprobs: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        if first_id is not None:
            tokens.append(token_text(self._tokenizer, first_id))
            logprobs.append(None)
            tops.append(None)
        for row in rows:
            tokens.append(token_text(self._tokenizer, row.token_id))
            logprobs.append(finite(row.logprob))
            tops.append(self._top(row))
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": logprobs,
            "top_logprobs": tops if self._with_top else None,
            "text_offset": offsets,
        }

    def _top(self, row: TokenLogprobs) -> dict[str, float]:
        top = {
            token_text(self._tokenizer, token_id): finite(logprob)
            for token_id, logprob in zip(row.top_ids, row.top_logprobs, strict=True)
        }
        top.setdefault(token_text(self._tokenizer, row.token_id), finite(row.logprob))
        return top


def prompt_logprobs(tokenizer: Tokenizer, rows: Sequence[TokenLogprobs]) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: null for the first token, then {token id: {logprob, rank, decoded_token}}."""
    shown: list[dict[str, Any] | None] = [None]
    for row in rows:
        entry = {str(row.token_id): _entry(tokenizer, row.token_id, row.logprob, row.rank)}
        for rank, (token_id, logprob) in enumerate(zip(row.top_ids, row.top_logprobs, strict=True), 1):
            entry.setdefault(str(token_id), _entry(tokenizer, token_id, logprob, rank))
        shown.append(entry)
    return shown


def _entry(tokenizer: Tokenizer, token_id: int, logprob: float, rank: int) -> dict[str, Any]:
    return {"logprob": finite(logprob), "rank": rank, "decoded_token": token_text(tokenizer, token_id)}


SglangRow = tuple[float | None, int, str | None]


def sglang_rows(tokenizer: Tokenizer | None, rows: Sequence[TokenLogprobs]) -> list[SglangRow]:
    """SGLang's (logprob, token id, text); the text is null without a tokenizer."""
    return [_sglang(tokenizer, row.token_id, row.logprob) for row in rows]


def sglang_tops(tokenizer: Tokenizer | None, rows: Sequence[TokenLogprobs]) -> list[list[SglangRow]]:
    """The most likely tokens of each position, as `sglang_rows`."""
    return [[_sglang(tokenizer, *pair) for pair in zip(row.top_ids, row.top_logprobs, strict=True)] for row in rows]


def _sglang(tokenizer: Tokenizer | None, token_id: int, logprob: float) -> SglangRow:
    return finite(logprob), token_id, None if tokenizer is None else token_text(tokenizer, token_id)
