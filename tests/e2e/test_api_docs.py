"""docs/api.md leaves out no route and no field; tests/test_docs.py runs its examples."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from equipoise.server.app import ROUTES
from equipoise.server.schemas import ChatBody, CompletionBody, GenerateBody, GenerateParams

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()


def test_every_route_is_described() -> None:
    for _, path, _ in ROUTES:
        assert f"{path.replace('{name:path}', '{id}')}`" in PAGE, path


@pytest.mark.parametrize("body", [CompletionBody, ChatBody, GenerateBody, GenerateParams])
def test_every_field_is_described(body: type[CompletionBody | ChatBody | GenerateBody | GenerateParams]) -> None:
    penalties = {"presence_penalty", "frequency_penalty", "repetition_penalty"}
    for field in set(body.__struct_fields__) - penalties:
        assert re.search(rf"`[^`]*\b{field}\b[^`]*`", PAGE), field
