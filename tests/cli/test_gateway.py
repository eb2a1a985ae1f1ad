"""`equipoise gateway` as its user meets it: flags, variables, files, and what it imports."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

WORKER = ("--worker", "http://127.0.0.1:1")


def run(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """`equipoise WORDS`, which must end by itself."""
    return subprocess.run(
        [sys.executable, "-m", "equipoise", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **env},
    )


def refusal(*words: str, **env: str) -> str:
    """The one line with which wrong settings end the command."""
    done = run(*words, **env)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("equipoise: ")
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "worker: there is none: name them with --worker"),
        (("--worker", "ftp://a:1"), "worker: 'ftp://a:1': only http:// is spoken to workers, not ftp://"),
        (("--worker", "http://a:1/v1"), "worker: 'http://a:1/v1' is not a URL like http://host:port"),
        (("--worker", "http://a:99999"), "worker: 'http://a:99999' is not a URL like http://host:port"),
        (("--worker", "http://a:1", "--worker", "a:1/"), "worker: http://a:1 is named twice"),
        (("--prefill", "http://a:1"), "decode: workers for prefill need workers for decode too"),
        (("--decode", "http://a:1"), "prefill: workers for decode need workers for prefill too"),
        (("--prefill", "http://a:1,x", "--decode", "b"), "after the comma comes the bootstrap port"),
        (("--prefill", "http://a:1,70000", "--decode", "b"), "bootstrap-port: 70000 must be at least 1"),
        ((*WORKER, "--worker-kind", "ollama"), '"ollama" for --worker-kind. Choose from: "auto", "equipoise"'),
        ((*WORKER, "--max-queue", "-1"), "max-queue: -1 must be at least 0"),
        ((*WORKER, "--max-inflight", "0"), "max-inflight: 0 must be at least 1"),
        ((*WORKER, "--max-retries", "1.5"), "--max-retries: 1.5 is not a whole number"),
        ((*WORKER, "--connect-timeout", "0"), "connect-timeout: 0.0 must be more than 0"),
        ((*WORKER, "--queue-timeout", "inf"), "queue-timeout: inf must be more than 0 and at most"),
        (
            (*WORKER, "--load-check-interval", "nan"),
            "load-check-interval: nan must be at least 0.01 and at most 3.1536e+07, or 0 for never",
        ),
        ((*WORKER, "--load-check-interval", "1e-9"), "load-check-interval: 1e-09 must be at least 0.01 "),
        ((*WORKER, "--health-check-interval", "0.009"), "health-check-interval: 0.009 must be at least 0.01 "),
        ((*WORKER, "--outlier-interval", "-1"), "outlier-interval: -1.0 must be at least 0.01 "),
        ((*WORKER, "--load-check-interval", "20"), "load-stale: 10.0 must be more than load-check-interval, 20.0"),
        ((*WORKER, "--retry-delay", "9"), "retry-max-delay: 2.0 must be at least retry-delay, 9.0"),
        ((*WORKER, "--max-ejected-share", "2"), "max-ejected-share: 2.0 must be at least 0 and at most 1"),
        ((*WORKER, "--fairness-header", "a b"), "fairness-header: 'a b' is not the name of a header"),
        ((*WORKER, "--admin-key", ""), "admin-key: it must be ASCII, not empty"),
        ((*WORKER, "--worker-api-key", "a\nb"), "worker-api-key: it must be ASCII"),
        ((*WORKER, "--port", "70000"), "port: 70000 must be at most 65535"),
        ((*WORKER, "--max-body-mb", "0"), "max-body-mb: 0.0"),
        ((*WORKER, "--policy", ""), "policy: it must not be empty"),
        ((*WORKER, "http://b:1"), "http://b:1: not understood, every setting is a flag"),
        (
            (*WORKER, "--max-running", "3"),
            "max-running is a setting of `equipoise serve`, `equipoise gateway` has none",
        ),
        ((*WORKER, "--no-prefix-cache"), "prefix-cache is a setting of `equipoise serve`"),
        ((*WORKER, "--max-que", "3"), "Did you mean --max-queue?"),
    ],
)
def test_wrong_words_end_with_2_and_one_line(words: tuple[str, ...], message: str) -> None:
    assert message in refusal("gateway", *words)


def test_a_flag_of_the_gateway_is_refused_by_serve() -> None:
    expected = "equipoise: max-queue is a setting of `equipoise gateway`, `equipoise serve` has none of that name\n"
    assert refusal("serve", "--max-queue", "3") == expected


@pytest.mark.parametrize("ending", ["toml", "yaml", "yml", "json"])
def test_settings_come_from_a_file_of_any_form(tmp_path: Path, ending: str) -> None:
    file = tmp_path / f"settings.{ending}"
    texts = {
        "toml": 'worker = ["a:1", "b:2", "a:1"]\nmax_queue = 3\n',
        "json": '{"worker": ["a:1", "b:2", "a:1"], "max-queue": 3}',
    }
    file.write_text(texts.get(ending, "# three\nworker:\n  - a:1\n  - b:2\n  - a:1\nmax-queue: 3\n"))
    assert "worker: http://a:1 is named twice" in refusal("gateway", "--config", str(file))
    assert "http://c:1 is named twice" in refusal(
        "gateway", "--config", str(file), EQUIPOISE_WORKER="http://c:1 http://c:1"
    ), "the environment wins over the file"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "max-running: 3", "max-running is a setting of `equipoise serve`, `equipoise gateway` has none"),
        ("a.yaml", "max-que: 3", "max-que is not a setting, did you mean max-queue?"),
        ("a.yaml", "max-queue: many", "max-queue: Expected int, got str"),
        ("a.yaml", "worker: [1]", "worker: Expected str, got int"),
        ("a.yaml", "- 1", "keys and values are expected"),
        ("a.yaml", "1: 2", "keys and values are expected"),
        ("a.yaml", "a: [", "a.yaml is not valid YAML"),
        ("a.yml", "a: \x00", "a.yml is not valid YAML"),
        ("a.json", "{", "a.json is not valid JSON"),
        ("a.json", "[]", "keys and values are expected"),
        ("a.toml", "a: 1", "a.toml is not valid TOML"),
        ("a.conf", "worker-kind = 'ollama'", "it must be one of auto, equipoise, sglang, vllm, openai"),
    ],
)
def test_a_wrong_file_ends_with_2_and_one_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    assert message in refusal("gateway", "--config", str(file))


def test_a_key_of_the_gateway_in_the_file_of_serve_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("policy = 'random'")
    assert "policy is a setting of `equipoise gateway`" in refusal("serve", "--config", str(file))


def test_the_environment_is_common_to_both_commands() -> None:
    env = {"EQUIPOISE_MAX_RUNNING": "0.5", "EQUIPOISE_MAX_QUEUE": "0.5"}
    assert refusal("gateway", **env) == "equipoise: EQUIPOISE_MAX_QUEUE: 0.5 is not a whole number\n"
    assert refusal("serve", **env) == "equipoise: EQUIPOISE_MAX_RUNNING: 0.5 is not a whole number\n"
    typo = refusal("gateway", EQUIPOISE_MAX_QUEU="1")
    assert typo == "equipoise: environment: EQUIPOISE_MAX_QUEU is not a setting, did you mean EQUIPOISE_MAX_QUEUE?\n"


def test_serve_does_not_import_the_gateway() -> None:
    assert imported_by("serve --help", "equipoise.gateway", "equipoise.route", "asyncio", "httptools", "yaml") == "[]"


def imported_by(words: str, *modules: str) -> str:
    """Which of `modules` are imported once `equipoise WORDS` ended, as a list's text."""
    code = (
        "import sys, equipoise.cli as cli\n"
        f"try: cli.main({words.split()!r})\n"
        f"finally: print(sorted(set({modules!r}) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.splitlines()[-1]
