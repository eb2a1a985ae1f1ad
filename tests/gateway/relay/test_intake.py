"""What is read of bodies, and fields put into them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.gateway.malformed import NOT_JSON

from equipoise.errors import InvalidValueError
from equipoise.gateway.relay.intake import INLINE_BYTES, read_generation, read_nothing, splice


def read(**fields: object) -> object:
    return read_generation(json.dumps(fields).encode())


def test_the_wanted_fields_are_read() -> None:
    intake = read_generation(
        b'{"model":"a/b","stream":true,"n":3,"max_tokens":7,"user":"u","routed_dp_rank":2,"return_logprob":true,'
        b'"messages": [{"role":"user","content":"\\u00e4"}],"other":{"model":"x"}}'
    )
    assert (intake.model, intake.is_stream, intake.num_choices, intake.max_tokens) == ("a/b", True, 3, 7)
    assert (intake.session, intake.named_rank, intake.return_logprob, intake.has_fields) == (b"u", 2, True, True)
    assert bytes(intake.prompt) == b'[{"role":"user","content":"\\u00e4"}]'
    assert intake.num_prompt_bytes == len(intake.prompt)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens"])
def test_each_spelling_of_the_limit_is_read(name: str) -> None:
    assert read_generation(json.dumps({name: 9}).encode()).max_tokens == 9


def test_a_name_that_no_model_can_have_is_refused() -> None:
    assert read_generation(b'{"model": "%b"}' % (b"m" * 4096)).model == "m" * 4096
    with pytest.raises(InvalidValueError, match="model: no name has over 4096 characters"):
        read_generation(b'{"model": "%b"}' % (b"m" * 4097))


def test_the_limit_in_sampling_params_is_read() -> None:
    assert read_generation(b'{"sampling_params":{"max_new_tokens":9}}').max_tokens == 9


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b'{"model":null,"stream":null,"max_tokens":null,"n":null,"user":null,"messages":null}',
        b'{"model":5,"stream":"yes","max_tokens":"many","n":-1,"user":{},"messages":{"a":1},"sampling_params":[]}',
        b'{"max_tokens":1e999,"n":1e999}',
        b'{"max_tokens":-5,"n":99999999999999999999999999,"session_id":[]}',
        b'{"model":true,"max_tokens":true,"n":true,"routed_dp_rank":null}',
        b'{"max_tokens":7.5,"sampling_params":{"max_new_tokens":null}}',
    ],
)
def test_odd_values_are_left_to_the_worker(body: bytes) -> None:
    intake = read_generation(body)
    assert (intake.model, intake.is_stream, intake.num_choices, intake.max_tokens) == (None, False, 1, None)
    assert (intake.session, intake.named_rank) == (None, None)


@pytest.mark.parametrize("name", NOT_JSON)
def test_what_is_no_object_is_refused(name: str) -> None:
    with pytest.raises(InvalidValueError):
        read_generation(NOT_JSON[name])


@pytest.mark.parametrize("name", ["messages", "prompt", "text", "input", "input_ids", "documents"])
def test_prompts_have_many_names(name: str) -> None:
    assert bytes(read_generation(b'{"%b" : "abc" }' % name.encode()).prompt) == b'"abc"'


@pytest.mark.parametrize(
    ("prompt", "num_ids"),
    [(b"[1, 2,3]", 3), (b"[[1,2],[3]]", 3), (b"[ [ 7 ] ]", 1), (b'["a, b"]', None), (b"[]", None), (b'"1,2"', None)],
)
def test_ids_are_counted(prompt: bytes, num_ids: int | None) -> None:
    assert read_generation(b'{"prompt":%b}' % prompt).num_prompt_ids == num_ids


def test_inline_data_counts_little() -> None:
    def length(num_images: int, num_bytes: int) -> int:
        url = "data:image/png;base64," + "A" * num_bytes
        content = [{"type": "image_url", "image_url": {"url": url}}] * num_images
        return read_generation(json.dumps({"messages": [{"content": content}]}).encode()).num_prompt_bytes

    assert length(1, 1_000_000) == length(1, 100_000)
    assert length(3, 1_000_000) < 3 * (INLINE_BYTES + 200)
    assert length(1, 500) < length(1, 600)


def test_inline_data_is_found_behind_many_semicolons() -> None:
    content = ";" * 1000 + "data:image/png;base64," + "A" * 100_000
    intake = read_generation(json.dumps({"messages": [content]}).encode())
    assert intake.num_prompt_bytes < 1000 + INLINE_BYTES + 200


def test_opaque_bodies_are_not_looked_at() -> None:
    intake = read_nothing(b"\xff")
    assert (intake.model, intake.has_fields, intake.num_prompt_bytes) == (None, False, 1)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
SPACE = st.text(" \t\r\n", max_size=4)


@given(st.dictionaries(st.text(), JSON, max_size=5), SPACE, SPACE, st.integers(), st.booleans())
def test_fields_are_put_in_and_all_else_stays(
    value: dict[str, object], before: str, after: str, rank: int, is_indented: bool
) -> None:
    value.pop("rank", None)
    text = json.dumps(value, indent=1 if is_indented else None)
    body = (before + "{" + after + text[1:] + before).encode("utf-8", "surrogatepass")
    spliced = splice(body, b'"rank":%d,"x\\u0000":[]' % rank)
    expected = {"rank": rank, "x\0": [], **value}
    assert json.loads(spliced.decode("utf-8", "surrogatepass")) == expected
    assert spliced.startswith(body.rstrip()[:-1].rstrip())
    assert spliced.endswith(body[body.rindex(b"}") :])


def test_fields_put_in_outrank_a_null() -> None:
    assert json.loads(splice(b'{"rank":null, "a":1 } ', b'"rank":2')) == {"rank": 2, "a": 1}


@pytest.mark.parametrize("name", ["bootstrap_host", "bootstrap_port", "bootstrap_room"])
def test_a_body_may_say_where_its_legs_meet(name: str) -> None:
    assert read_generation(b'{"%b":0}' % name.encode()).named_bootstrap == name
    assert read_generation(b'{"%b":null}' % name.encode()).named_bootstrap is None


@pytest.mark.parametrize(("value", "rank"), [(b"3", 3), (b"null", None)])
def test_a_body_may_name_the_rank_that_prefills(value: bytes, rank: int | None) -> None:
    assert read_generation(b'{"disagg_prefill_dp_rank":%b}' % value).named_prefill_rank == rank


@pytest.mark.parametrize("name", ["routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank"])
@pytest.mark.parametrize("value", ['"1"', "1.5", "true", "[1]"])
def test_a_rank_that_is_no_number_is_refused_instead_of_overridden(name: str, value: str) -> None:
    with pytest.raises(InvalidValueError) as refused:
        read_generation(f'{{"{name}":{value}}}'.encode())
    assert refused.value.field == name
    assert refused.value.message == f"{name}: {value} must be a whole number, as the worker counts its ranks"


@pytest.mark.parametrize(
    ("value", "is_asked"), [(b"true", True), (b"false", False), (b"[false,true]", True), (b"[]", False), (b"1", False)]
)
def test_logprobs_are_asked_for_all_prompts_or_some(value: bytes, is_asked: bool) -> None:
    assert read_generation(b'{"return_logprob":%b}' % value).return_logprob is is_asked
