"""Request bodies into `SamplingParams`: which field means what, which exclude each other."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import msgspec

from equipoise.errors import InvalidValueError
from equipoise.request import Grammar, SamplingParams
from equipoise.server import schemas

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from equipoise.server.schemas import ChatBody, CompletionBody, GenerateBody, GenerateParams, SamplingFields

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default of /v1/completions; a chat may go on until the model's length."""

_SGLANG_NAMES = {
    "max_tokens": "sampling_params.max_new_tokens",
    "min_tokens": "sampling_params.min_new_tokens",
    "seed": "sampling_params.sampling_seed",
    "logprobs": "top_logprobs_num",
    "prompt_logprobs": "top_logprobs_num",
}
_RANK_NAMES = ("grammar", "response_format")


def completion_params(body: CompletionBody, vocab_size: int) -> SamplingParams:
    """Parameters of /v1/completions. Raises InvalidValueError naming the field."""
    if body.suffix:
        raise InvalidValueError("suffix: this model cannot fill in before a suffix", "suffix", "unsupported_parameter")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidValueError(f"best_of: {body.best_of} is not served, it must equal n", "best_of")
    max_tokens = COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if body.echo and max_tokens == 0:
        max_tokens = 1  # the drawn token is dropped: the caller wants its own prompt scored
    prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        prompt_logprobs = body.logprobs if prompt_logprobs is None else max(prompt_logprobs, body.logprobs)
    return _shared(body, vocab_size, max_tokens, body.logprobs, prompt_logprobs, grammar_of(body))


def chat_params(body: ChatBody, vocab_size: int, grammar: Grammar | None) -> SamplingParams:
    """Parameters of /v1/chat/completions; `grammar` is what the tool choice asks for, or None."""
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidValueError("top_logprobs: logprobs must be true as well", "top_logprobs")
    if body.modalities is not None and body.modalities != ["text"]:
        raise InvalidValueError(f'modalities: {body.modalities} is not served, only ["text"]', "modalities")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    asked = grammar_of(body)
    if grammar is not None and asked is not None:
        raise InvalidValueError(
            "tool_choice: a required tool call excludes response_format and its like", "tool_choice"
        )
    names = {"logprobs": "top_logprobs"}
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    with _renaming(names):
        return _shared(body, vocab_size, max_tokens, logprobs, body.prompt_logprobs, grammar or asked)


@contextlib.contextmanager
def _renaming(names: dict[str, str], others: str = "") -> Iterator[None]:
    """Errors of a field in `names` bear that name instead; those of other fields get `others` before theirs."""
    try:
        yield
    except InvalidValueError as error:
        ours = error.field or ""
        theirs = names.get(ours, others + ours)
        raise InvalidValueError(f"{theirs}: {error.message.removeprefix(f'{ours}: ')}", theirs, error.code) from None


def _shared(
    body: SamplingFields,
    vocab_size: int,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    grammar: Grammar | None,
) -> SamplingParams:
    if body.stream and prompt_logprobs is not None:
        raise InvalidValueError("prompt_logprobs: not available in a stream, set stream to false", "prompt_logprobs")
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens or 0,
        temperature=_or(body.temperature, 1.0),
        top_p=_or(body.top_p, 1.0),
        top_k=_top_k(body.top_k),
        min_p=_or(body.min_p, 0.0),
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        logit_bias=body.logit_bias or None,
        seed=body.seed,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        stop=_texts(body.stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        skip_special_tokens=body.skip_special_tokens is not False,
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        n=_or(body.n, 1),
        grammar=grammar,
    )
    params.check(vocab_size)
    return params


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _top_k(top_k: int | None) -> int:
    """-1 and not given mean the same: no bound."""
    return 0 if top_k is None or top_k == -1 else top_k


def _texts(stop: str | list[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def generate_params(body: GenerateBody, given: GenerateParams, vocab_size: int) -> SamplingParams:
    """Parameters of /generate, for one of its prompts."""
    constraints = {"json_schema": given.json_schema, "regex": given.regex, "ebnf": given.ebnf}
    want_prompt = bool(body.return_logprob) and body.logprob_start_len not in (None, -1)
    if body.stream and want_prompt:
        raise InvalidValueError("logprob_start_len: not available in a stream", "logprob_start_len")
    num_top = body.top_logprobs_num or 0
    params = SamplingParams(
        max_tokens=given.max_new_tokens,
        min_tokens=given.min_new_tokens or 0,
        temperature=_or(given.temperature, 1.0),
        top_p=_or(given.top_p, 1.0),
        top_k=_top_k(given.top_k),
        min_p=_or(given.min_p, 0.0),
        repetition_penalty=_or(given.repetition_penalty, 1.0),
        presence_penalty=_or(given.presence_penalty, 0.0),
        frequency_penalty=_or(given.frequency_penalty, 0.0),
        logit_bias=given.logit_bias or None,
        seed=given.sampling_seed,
        logprobs=num_top if body.return_logprob else None,
        prompt_logprobs=num_top if want_prompt else None,
        stop=_texts(given.stop),
        stop_token_ids=tuple(given.stop_token_ids or ()),
        ignore_eos=bool(given.ignore_eos),
        skip_special_tokens=given.skip_special_tokens is not False,
        include_stop_str_in_output=bool(given.no_stop_trim),
        n=_or(given.n, 1),
        grammar=_one_grammar(_named(constraints.items())),
    )
    with _renaming(_SGLANG_NAMES, "sampling_params."):
        params.check(vocab_size)
    return params


@contextlib.contextmanager
def naming_constraint(field: str | None) -> Iterator[None]:
    """The rank calls every constraint by one name: give its complaints the name of the field that was sent."""
    try:
        yield
    except InvalidValueError as error:
        if field is None or error.field not in _RANK_NAMES:
            raise
        message = f"{field}: {error.message.removeprefix(f'{error.field}: ')}"
        raise InvalidValueError(message, field, "invalid_schema") from None


def constraint_field(body: SamplingFields) -> str | None:
    """The field that `grammar_of` reads, None when there is none."""
    found = _constraints(body)
    return found[0][0] if found else None


def grammar_of(body: SamplingFields) -> Grammar | None:
    """The constraint that a body asks for, in whichever spelling. Raises InvalidValueError when it asks for two."""
    return _one_grammar(_constraints(body))


def _constraints(body: SamplingFields) -> list[tuple[str, Grammar]]:
    found = _named(
        (name, getattr(body, name))
        for name in ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "json_schema", "regex", "ebnf")
    )
    if body.response_format is not None:
        grammar = _response_format(body.response_format)
        found += [("response_format", grammar)] if grammar else []
    if body.structured_outputs is not None:
        inside = body.structured_outputs
        found += _named(
            (f"structured_outputs.{name}", getattr(inside, name)) for name in ("json", "regex", "choice", "grammar")
        )
        if inside.json_object:
            found.append(("structured_outputs.json_object", Grammar("json_object")))
    return found


def _response_format(asked: schemas.ResponseFormat) -> Grammar | None:
    match asked:
        case schemas.JsonObjectFormat():
            return Grammar("json_object")
        case schemas.JsonSchemaFormat():
            schema = asked.json_schema.json_schema
            field = "response_format.json_schema.schema"
            return Grammar("json_object") if schema is None else _schema_grammar(schema, field)
        case schemas.RegexFormat():
            return _regex_grammar(asked.pattern, "response_format.pattern")
        case schemas.GrammarFormat():
            return _text_grammar(asked.grammar, "response_format.grammar")
        case _:
            return None


def _named(fields: Iterable[tuple[str, Any]]) -> list[tuple[str, Grammar]]:
    """(field, value) pairs as grammars; the field's last word says how the value is read."""
    found = []
    for name, value in fields:
        if value is None:
            continue
        kind = name.rpartition(".")[2].removeprefix("guided_")
        if kind in ("json", "json_schema"):
            grammar = _schema_grammar(value, name)
        elif kind == "regex":
            grammar = _regex_grammar(value, name)
        elif kind == "choice":
            grammar = _choice_grammar(value, name)
        else:
            grammar = _text_grammar(value, name)
        found.append((name, grammar))
    return found


def _one_grammar(found: list[tuple[str, Grammar]]) -> Grammar | None:
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise InvalidValueError(f"{names}: only one constraint may be given", found[1][0])
    return found[0][1] if found else None


def _schema_grammar(schema: dict[str, Any] | str | bool, field: str) -> Grammar:
    if isinstance(schema, str):
        try:
            parsed = msgspec.json.decode(schema)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise InvalidValueError(f"{field}: not valid JSON: {error}", field, "invalid_schema") from None
        if not isinstance(parsed, dict | bool):
            raise InvalidValueError(f"{field}: a JSON schema must be an object", field, "invalid_schema")
        return Grammar("json_schema", schema)
    return Grammar("json_schema", msgspec.json.encode(schema).decode())


def _regex_grammar(pattern: str, field: str) -> Grammar:
    if not pattern:
        raise InvalidValueError(f"{field}: the pattern is empty", field)
    return Grammar("regex", pattern)


def _choice_grammar(choices: list[str], field: str) -> Grammar:
    if not choices or not all(choices):
        raise InvalidValueError(f"{field}: at least one choice is needed, none of them empty", field)
    quoted = (msgspec.json.encode(choice).decode() for choice in choices)
    return Grammar("ebnf", "root ::= " + " | ".join(quoted))


def _text_grammar(text: str, field: str) -> Grammar:
    if not text.strip():
        raise InvalidValueError(f"{field}: the grammar is empty", field)
    return Grammar("ebnf", text)
