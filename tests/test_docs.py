"""What the papers say is run: their curl commands, their Python, their links, their lists."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
from tests import serving
from tests.gateway.processes import Fleet

from equipoise.cli.settings import keys_of

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent
PAPERS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "src/equipoise/demo/README.md"])
FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
VOLATILE = ("id", "created", "timestamp")


class Block(NamedTuple):
    """A fenced block; `shown` is the block right after it, when that shows its output."""

    paper: str
    info: str
    body: str
    shown: str | None

    @property
    def label(self) -> str:
        return f"{self.paper}: {self.body.strip().splitlines()[0][:50]}"


def blocks() -> Iterator[Block]:
    """Every fenced block of every paper."""
    for paper in PAPERS:
        text = paper.read_text(encoding="utf-8")
        found = list(FENCE.finditer(text))
        for block, after in zip(found, [*found, None][1:], strict=True):
            is_output = after is not None and after["info"] in ("json", "text")
            follows = is_output and not text[block.end() : after.start()].strip()  # type: ignore[union-attr]
            yield Block(
                str(paper.relative_to(ROOT)), block["info"], block["body"], after["body"] if follows and after else None
            )


CURLS = [block for block in blocks() if block.info == "bash" and block.body.startswith("curl")]
CURL_FAILS = 'curl() { command curl --fail-with-body "$@"; }\n'
"""Makes every curl of a block end it when the answer is an error."""
GATEWAY = "localhost:8080"
PYTHONS = [block for block in blocks() if block.info == "python runnable"]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The demo model, served as `make serve` does."""
    with serving.serve("--model", "demo", "--kv-memory-gb", "0.25") as server:
        yield server.url


@pytest.fixture(scope="module")
def gateway_url(url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A gateway before the demo model."""
    with Fleet(tmp_path_factory.mktemp("gateway")) as fleet:
        yield fleet.gateway("--worker", url).url


def without_volatile(value: object) -> object:
    """An answer without what differs from call to call."""
    if isinstance(value, dict):
        return {key: without_volatile(item) for key, item in value.items() if key not in VOLATILE}
    if isinstance(value, list):
        return [without_volatile(item) for item in value]
    return value


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on this machine")
@pytest.mark.parametrize("block", CURLS, ids=lambda block: block.label)
def test_curl_answers_as_shown(block: Block, url: str, request: pytest.FixtureRequest) -> None:
    command = CURL_FAILS + re.sub(r"(http://)?(localhost|127\.0\.0\.1):8000", url, block.body)
    if GATEWAY in command:
        command = command.replace(GATEWAY, request.getfixturevalue("gateway_url"))
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout, "no answer"
    assert '"error":' not in done.stdout, done.stdout
    if block.shown is not None:
        assert without_volatile(json.loads(done.stdout)) == without_volatile(json.loads(block.shown))


@pytest.mark.parametrize("block", PYTHONS, ids=lambda block: block.label)
def test_python_prints_as_shown(block: Block, url: str, tmp_path: Path) -> None:
    assert block.shown is not None, "a runnable block is followed by its output"
    script = tmp_path / "block.py"
    script.write_text(block.body.replace("http://localhost:8000", url), encoding="utf-8")
    assert output_of(script) == block.shown


def output_of(script: Path, *arguments: str) -> str:
    """Standard output of a Python script that ends with 0."""
    done = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_examples_run(url: str) -> None:
    assert "12+7= 19\n" in output_of(ROOT / "examples" / "batch.py")
    assert output_of(ROOT / "examples" / "openai_client.py", url) == "3, 4, 5, 6, 7, 8, 9, 10, 11, 12\n"


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: str(paper.relative_to(ROOT)))
def test_links_lead_somewhere(paper: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", paper.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (paper.parent / target).exists(), f"{paper.name} links to {target}"


@pytest.mark.parametrize(("paper", "command"), [("serving.md", "serve"), ("gateway.md", "gateway")])
def test_flags_in_the_docs_exist(paper: str, command: str) -> None:
    foreign = [
        "torch-backend",
        "local-dir",
        "max-time",
        "help",
        "config",
        "version",
        "json",
        "system",
        "enable-metrics",
        "enable-cache-report",
        "enable-prompt-tokens-details",
    ]
    for block in re.findall(r"`([^`]*--[^`]*)`", (ROOT / "docs" / paper).read_text(encoding="utf-8")):
        for flag in re.findall(r"--([a-z][a-z-]*)", block):
            assert flag.removeprefix("no-") in {*keys_of(command).types, *foreign}, (
                f"--{flag} is not a flag of equipoise {command}"
            )


def test_list_of_model_families_is_complete() -> None:
    code = "from equipoise.exec.torch.models.load import *; print(*sorted({*FAMILIES, *BORROWED}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    supported = done.stdout.split()
    table = (ROOT / "docs" / "models.md").read_text(encoding="utf-8").split("## The demo model")[0]
    for family in supported:
        assert f"`{family}`" in table, family
    for paper in ("README.md", "CHANGELOG.md"):
        counts = re.findall(r"(\d+)(?: families|, dense)", (ROOT / paper).read_text(encoding="utf-8"))
        assert counts == [str(len(supported))], f"{paper} speaks of {counts}, there are {len(supported)}"


def test_makefile_targets_of_the_readme_exist() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for paper in PAPERS:
        for target in re.findall(r"(?:^|`)make ([a-z-]+)", paper.read_text(encoding="utf-8"), re.MULTILINE):
            assert target in targets, f"{paper.name}: make {target}"
