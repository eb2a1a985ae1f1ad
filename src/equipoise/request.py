"""A request: what the user asked (`SamplingParams`) and what the rank keeps of it (`Request`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec
import numpy as np

from equipoise.errors import InvalidValueError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Tokens = NDArray[np.int32]

FinishReason = Literal["stop", "length", "abort", "error"]
GrammarKind = Literal["json_schema", "json_object", "regex", "ebnf", "structural_tag"]

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_COUNT = 2**31 - 1
"""Bounds numbers of tokens: the columns add several of them in 64 bits."""


class Grammar(msgspec.Struct, frozen=True):
    """A constraint on the output: `kind` says how `text` is read (JSON schemas as JSON text)."""

    kind: GrammarKind
    text: str = ""


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """How tokens are drawn and when a request ends. Greedy when `temperature` is 0.

    `max_tokens` None means "until the model's length". `seed` makes the draw a function of seed and
    position alone, whatever else is in the batch. `logprobs` N reports the drawn token and the N most
    likely (0: the drawn token alone); `prompt_logprobs` does so for every prompt token but the first.
    """

    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    n: int = 1
    grammar: Grammar | None = None

    def check(self, vocab_size: int) -> None:
        """Raise InvalidValueError, naming field, value and range, unless every field can be served.

        Types too: a program may put anything into a struct, and the rank would fail to read it."""
        _check_types(self)
        _within("max_tokens", self.max_tokens, 1, MAX_COUNT)
        _within("min_tokens", self.min_tokens, 0, MAX_COUNT if self.max_tokens is None else self.max_tokens)
        _within("temperature", self.temperature, 0.0, 100.0)
        _within("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _within("top_k", self.top_k, -1, MAX_COUNT)
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _within("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _within("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _within("seed", self.seed, -(2**63), 2**63 - 1)
        _within("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _within("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        _within("n", self.n, 1, 128)
        _at_most("stop", len(self.stop), MAX_STOP_STRINGS)
        _at_most("stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKEN_IDS)
        if any(not text for text in self.stop):
            raise InvalidValueError("stop: every stop string must have at least one character", "stop")
        for token in self.stop_token_ids:
            _within("stop_token_ids", token, 0, vocab_size - 1)
        if self.logit_bias:
            _at_most("logit_bias", len(self.logit_bias), MAX_LOGIT_BIAS)
            for token, bias in self.logit_bias.items():
                _within("logit_bias", token, 0, vocab_size - 1)
                _within("logit_bias", bias, -100.0, 100.0)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(SamplingParams)


def _check_types(params: SamplingParams) -> None:
    """There and back as it goes to the rank, 0.8 us; only a failure is looked into."""
    try:
        _decoder.decode(_encoder.encode(params))
    except (msgspec.ValidationError, TypeError, ValueError, OverflowError):
        pass
    else:
        return
    for field in msgspec.structs.fields(SamplingParams):
        value = getattr(params, field.name)
        try:
            msgspec.msgpack.decode(_encoder.encode(value), type=field.type)
        except msgspec.ValidationError as error:
            reason = str(error).partition(" - at")[0].replace("`", "")
            raise InvalidValueError(f"{field.name}: {value!r} is of a wrong type: {reason}", field.name) from None
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidValueError(f"{field.name}: {value!r} cannot be sent: {error}", field.name) from None


def _within(field: str, value: float | None, low: float, high: float, *, open_low: bool = False) -> None:
    if value is None:
        return
    # written so that NaN fails too
    if (value > low if open_low else value >= low) and value <= high:
        return
    allowed = f"{'more than' if open_low else 'at least'} {low} and at most {high}"
    raise InvalidValueError(f"{field}: {value} is out of range, it must be {allowed}", field)


def _at_most(field: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidValueError(f"{field}: {count} entries, at most {most} are allowed", field)


class EncoderItem(NamedTuple):
    """`n` embeddings for prompt positions [start, start + n), made from the input (an image) that `key` stands for."""

    start: int
    n: int
    key: str


class Request:
    """What one rank keeps of a request. While it holds a seat, its hot state lives in the columns.

    `handle` is unique in the rank's life and names the request on the wire and in every plan row.
    Token ranges: [0, num_prompt) prompt, [num_prompt, num_prompt + len(output_ids)) known outputs.
    """

    __slots__ = (
        "arrival_s",
        "cache_salt",
        "deadline_s",
        "encoder_items",
        "finish_reason",
        "handle",
        "held_since_s",
        "lora",
        "may_load",
        "num_bypassed",
        "num_cached",
        "num_computed",
        "num_inflight",
        "num_loaded",
        "num_preemptions",
        "num_published",
        "output_ids",
        "page_keys",
        "pages",
        "params",
        "parked_for",
        "place",
        "priority",
        "prompt_ids",
        "request_id",
        "seat",
        "stop_ids",
        "stop_len",
        "uses_prefix_cache",
    )

    def __init__(
        self,
        handle: int,
        request_id: str,
        prompt_ids: Tokens,
        params: SamplingParams,
        *,
        max_model_len: int,
        eos_ids: tuple[int, ...] = (),
        arrival_s: float = 0.0,
        priority: int = 0,
        cache_salt: str = "",
        deadline_s: float | None = None,
        lora: str | None = None,
        encoder_items: tuple[EncoderItem, ...] = (),
    ) -> None:
        """`prompt_ids`: (num_prompt,) int32, not empty, shorter than `max_model_len` (raises InvalidValueError)."""
        num_prompt = len(prompt_ids)
        if not 0 < num_prompt < max_model_len:
            raise InvalidValueError(
                f"prompt: {num_prompt} tokens, it must have at least 1 and at most {max_model_len - 1}", "prompt"
            )
        self.handle = handle
        self.request_id = request_id
        self.prompt_ids = prompt_ids
        self.params = params
        self.arrival_s = arrival_s
        self.priority = priority
        self.cache_salt = cache_salt
        self.deadline_s = deadline_s
        self.lora = lora
        self.encoder_items = encoder_items
        self.stop_len = min(num_prompt + (params.max_tokens or max_model_len), max_model_len)
        self.stop_ids = tuple(dict.fromkeys(params.stop_token_ids + (() if params.ignore_eos else eos_ids)))
        # Prompt logprobs need every prompt position's logits: pages computed by others carry none.
        self.uses_prefix_cache = params.prompt_logprobs is None
        self.output_ids: list[int] = []
        self.pages: list[int] = []
        self.page_keys: list[bytes] = []
        self.num_computed = 0
        self.num_inflight = 0
        self.num_bypassed = 0
        self.num_cached = 0
        self.num_preemptions = 0
        self.num_published = 0
        self.num_loaded = 0
        self.may_load = self.uses_prefix_cache
        self.seat: int | None = None
        self.place = "new"
        self.parked_for: tuple[str, str] | None = None
        self.held_since_s: float | None = None
        self.finish_reason: FinishReason | None = None

    def extend_prompt(self, tokens: Tokens, max_model_len: int) -> None:
        """Append (n,) int32 `tokens` to the prompt of a request that has computed nothing.

        Raises InvalidValueError when prompt and one output would not fit `max_model_len`."""
        num_prompt = len(self.prompt_ids) + len(tokens)
        if num_prompt >= max_model_len:
            raise InvalidValueError(f"prompt: {num_prompt} tokens, at most {max_model_len - 1} are allowed", "prompt")
        self.stop_len = min(self.stop_len + len(tokens), max_model_len)
        self.prompt_ids = np.concatenate([self.prompt_ids, tokens])

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_ids)

    @property
    def prefix_salt(self) -> str:
        """Requests share pages only if this is equal: adapter and images change what KV the same tokens have.

        The salt, which a user writes, comes last: what is before it is ours and can be told apart."""
        items = ";".join(f"{item.start},{item.n},{item.key}" for item in self.encoder_items)
        return f"{self.lora or ''}\0{items}\0{self.cache_salt}"

    @property
    def num_known(self) -> int:
        """Tokens whose values are known: prompt and outputs that came back. Not current while seated."""
        return len(self.prompt_ids) + len(self.output_ids)

    def __repr__(self) -> str:
        return f"<Request {self.request_id} #{self.handle} {self.place} computed={self.num_computed}>"
