"""The examples in docs/api.md, run as they stand against a real server."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from equipoise.server.app import ROUTES
from equipoise.server.schemas import ChatBody, CompletionBody, GenerateBody, GenerateParams

if TYPE_CHECKING:
    from tests.serving import Server

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
EXAMPLES = [
    command
    for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    for command in re.split(r"\n(?=curl )", block.strip())
]


@pytest.mark.parametrize("command", EXAMPLES)
def test_examples_run(torch_server: Server, command: str) -> None:
    assert "http://127.0.0.1:8000" in command
    line = command.replace("http://127.0.0.1:8000", torch_server.url)
    done = subprocess.run(["bash", "-c", f"{line} --fail-with-body"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert done.stdout
    assert '"error"' not in done.stdout


def test_every_route_is_described() -> None:
    for _, path, _ in ROUTES:
        assert f"{path.replace('{name:path}', '{id}')}`" in PAGE, path


@pytest.mark.parametrize("body", [CompletionBody, ChatBody, GenerateBody, GenerateParams])
def test_every_field_is_described(body: type[CompletionBody | ChatBody | GenerateBody | GenerateParams]) -> None:
    penalties = {"presence_penalty", "frequency_penalty", "repetition_penalty"}
    for field in set(body.__struct_fields__) - penalties:
        assert re.search(rf"`[^`]*\b{field}\b[^`]*`", PAGE), field
