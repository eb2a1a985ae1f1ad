"""JSON schema keywords that the grammar compiler reads over: a schema with one would hold less than it says.

Found by trying each keyword against a value that breaks it, with xgrammar 0.2.8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

UNHELD = (
    *("not", "contains", "minContains", "maxContains", "if", "then", "else"),
    *("dependentRequired", "dependentSchemas", "dependencies"),
)
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMA = ("items", "additionalProperties", "propertyNames", "unevaluatedItems", "unevaluatedProperties")
_SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")


def unheld_keyword(schema: object) -> str | None:
    """The first keyword anywhere in `schema`, decoded JSON, that would not be held; None when all are."""
    pending = [schema]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            keyword = _unheld_here(node)
            if keyword is not None:
                return keyword
            pending.extend(_subschemas(node))
    return None


def _unheld_here(node: dict[str, object]) -> str | None:
    for keyword in UNHELD:
        if keyword in node:
            return f'"{keyword}"'
    if node.get("uniqueItems") is True:
        return '"uniqueItems"'
    parts = node.get("allOf")
    if isinstance(parts, list) and len(parts) > 1:
        return '"allOf" with more than one schema'
    if "pattern" in node and ("minLength" in node or "maxLength" in node):
        return '"pattern" together with "minLength" or "maxLength"'
    return None


def _subschemas(node: dict[str, object]) -> Iterator[object]:
    """Where schemas stand in a schema; what is under "enum", "const", "default" and the like is data."""
    for keyword in _SCHEMAS_BY_NAME:
        named = node.get(keyword)
        if isinstance(named, dict):
            yield from named.values()
    for keyword in _SCHEMA:
        yield node.get(keyword)
    for keyword in _SCHEMA_LISTS:
        listed = node.get(keyword)
        if isinstance(listed, list):
            yield from listed
