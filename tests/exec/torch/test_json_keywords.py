"""What the grammar compiler does not hold is refused by name; what it holds, and what only looks alike, is not."""

from __future__ import annotations

import json

import pytest

from equipoise.errors import InvalidValueError
from equipoise.exec.torch.grammar_compiler import check_grammar
from equipoise.exec.torch.json_keywords import UNHELD, unheld_keyword
from equipoise.request import Grammar

INTEGER = {"type": "integer"}


@pytest.mark.parametrize("keyword", UNHELD)
def test_a_keyword_that_is_read_over_is_named(keyword):
    assert unheld_keyword({keyword: INTEGER}) == f'"{keyword}"'


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "array", "uniqueItems": True}, '"uniqueItems"'),
        ({"allOf": [INTEGER, INTEGER]}, '"allOf" with more than one schema'),
        ({"pattern": "a", "maxLength": 3}, '"pattern" together with "minLength" or "maxLength"'),
        ({"properties": {"a": {"items": {"not": INTEGER}}}}, '"not"'),
        ({"$defs": {"a": {"anyOf": [INTEGER, {"if": INTEGER}]}}}, '"if"'),
        ({"prefixItems": [{"contains": INTEGER}]}, '"contains"'),
        ({"additionalProperties": {"allOf": [{"not": INTEGER}]}}, '"not"'),
    ],
)
def test_wherever_it_stands(schema, named):
    assert unheld_keyword(schema) == named


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"not": INTEGER, "if": INTEGER, "contains": INTEGER}},
        {"enum": [{"not": 1}]},
        {"const": {"if": 1}},
        {"default": {"uniqueItems": True}},
        {"uniqueItems": False, "allOf": [INTEGER], "pattern": "a"},
        {"minLength": 1, "maxLength": 2},
        True,
    ],
)
def test_what_only_looks_like_a_keyword_is_none(schema):
    assert unheld_keyword(schema) is None


def test_the_refusal_names_keyword_and_field():
    with pytest.raises(InvalidValueError, match='response_format: "not" in a JSON schema is not supported') as raised:
        check_grammar(Grammar("json_schema", json.dumps({"properties": {"a": {"not": INTEGER}}})))
    assert raised.value.field == "response_format"
