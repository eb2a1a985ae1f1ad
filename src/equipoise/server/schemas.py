"""What clients may send, field by field: one struct per body. An unknown field is an error that names it.

`None` always means "not given": OpenAI clients send null for what they leave out. Fields under "accepted
and ignored" are sent by OpenAI clients and have no meaning here.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

Prompt = str | list[str | int | list[int]]


class TextFormat(Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """Any text."""


class JsonObjectFormat(Struct, tag_field="type", tag="json_object", forbid_unknown_fields=True):
    """Any JSON object."""


class JsonSchema(Struct, forbid_unknown_fields=True, rename={"json_schema": "schema"}):
    """A named JSON schema."""

    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class JsonSchemaFormat(Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    """JSON that a schema describes."""

    json_schema: JsonSchema


class RegexFormat(Struct, tag_field="type", tag="regex", forbid_unknown_fields=True):
    """Text that a regular expression matches from start to end."""

    pattern: str


class GrammarFormat(Struct, tag_field="type", tag="grammar", forbid_unknown_fields=True):
    """Text of a context-free grammar in GBNF, start rule "root"."""

    grammar: str


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat | RegexFormat | GrammarFormat


class StructuredOutputs(Struct, forbid_unknown_fields=True):
    """vLLM's way to name a constraint; exactly one may be given."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class StreamOptions(Struct, forbid_unknown_fields=True):
    """`include_usage`: a last chunk with the token counts."""

    include_usage: bool | None = None

    # Accepted and ignored
    include_obfuscation: bool | None = None


class SamplingFields(Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields that completions and chat completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    response_format: ResponseFormat | None = None

    # Beyond OpenAI's API
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    rid: str | None = None
    routed_dp_rank: int | None = None
    data_parallel_rank: int | None = None

    # Constraints as vLLM and SGLang spell them
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    ebnf: str | None = None

    # Accepted and ignored
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    spaces_between_special_tokens: bool | None = None


class CompletionBody(SamplingFields, kw_only=True):
    """POST /v1/completions."""

    prompt: Prompt
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


class FunctionCall(Struct):
    """A call as an assistant message carries it; `arguments` is JSON text or an object."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(Struct):
    """An entry of an assistant message's `tool_calls`."""

    function: FunctionCall
    id: str | None = None
    type: str = "function"
    index: int | None = None


class ChatMessage(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    # Accepted and ignored: clients send an answer's message back as they got it
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: dict[str, Any] | None = None
    function_call: FunctionCall | None = None


class Function(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, forbid_unknown_fields=True):
    """An entry of `tools`."""

    function: Function
    type: Literal["function"] = "function"


class NamedFunction(Struct, forbid_unknown_fields=True):
    """The name of a function."""

    name: str


class NamedTool(Struct, forbid_unknown_fields=True):
    """`tool_choice` that names one function."""

    function: NamedFunction
    type: Literal["function"] = "function"


class ChatBody(SamplingFields, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    modalities: list[str] | None = None

    # Accepted and ignored
    verbosity: str | None = None
    prediction: dict[str, Any] | None = None


class TokenizeBody(Struct, forbid_unknown_fields=True):
    """POST /tokenize: `prompt`, or `messages` rendered by the chat template."""

    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[Tool] | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(Struct, forbid_unknown_fields=True):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None
    skip_special_tokens: bool | None = None


class GenerateParams(Struct, forbid_unknown_fields=True):
    """`sampling_params` of POST /generate, with SGLang's names."""

    max_new_tokens: int | None = 128
    min_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    sampling_seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    n: int | None = None
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    spaces_between_special_tokens: bool | None = None


class GenerateBody(Struct, forbid_unknown_fields=True):
    """POST /generate."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: GenerateParams | list[GenerateParams] | None = None
    stream: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool | None = None
    rid: str | list[str] | None = None
    model: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    routed_dp_rank: int | None = None
    data_parallel_rank: int | None = None


class AbortBody(Struct, forbid_unknown_fields=True):
    """POST /abort_request: one request by `rid`, or all."""

    rid: str | None = None
    abort_all: bool | None = None


class PauseBody(Struct, forbid_unknown_fields=True):
    """POST /pause: "new" lets running requests finish, "all" stops them where they are."""

    mode: Literal["new", "all"] = "new"


class Usage(Struct):
    """Token counts of an answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]


def usage_of(num_prompt: int, num_output: int, num_cached: int) -> Usage:
    """Counts in OpenAI's shape."""
    return Usage(num_prompt, num_output, num_prompt + num_output, {"cached_tokens": num_cached})


class FunctionOut(Struct, omit_defaults=True):
    """A call in an answer; in a stream its parts come in several chunks."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallOut(Struct, omit_defaults=True):
    """A tool call in an answer. `index` is there in streams alone."""

    function: FunctionOut
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    index: int | UnsetType = UNSET


completion_decoder = msgspec.json.Decoder(CompletionBody)
chat_decoder = msgspec.json.Decoder(ChatBody)
generate_decoder = msgspec.json.Decoder(GenerateBody)
tokenize_decoder = msgspec.json.Decoder(TokenizeBody)
detokenize_decoder = msgspec.json.Decoder(DetokenizeBody)
abort_decoder = msgspec.json.Decoder(AbortBody)
pause_decoder = msgspec.json.Decoder(PauseBody)
