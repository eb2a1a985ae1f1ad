"""Workers as operators name them."""

from __future__ import annotations

import pytest

from equipoise.config.worker import WorkerSpec, prefill_worker, worker_url
from equipoise.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://host:8000", "http://host:8000"),
        (" http://Host:8000/ ", "http://host:8000"),
        ("host:8000", "http://host:8000"),
        ("host", "http://host:80"),
        ("10.0.0.1:1", "http://10.0.0.1:1"),
        ("http://[::1]:30000", "http://[::1]:30000"),
    ],
)
def test_texts_for_one_worker_give_one_url(text: str, url: str) -> None:
    assert worker_url(text) == url
    assert WorkerSpec(text).url == url


@pytest.mark.parametrize(
    "text",
    ["", " ", "http://", "https://a:1", "http://a:x", "http://a:65536", "http://a/v1", "http://a?b", "a#b", "u:p@a:1"],
)
def test_what_is_no_worker_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^worker: "):
        worker_url(text)


@pytest.mark.parametrize(
    "text",
    ["http://a b:1", "http://a\x00:1", "http://ä:1", "http://[::1:1", "http://a:0", "a:-1"],
)
def test_what_no_client_could_connect_to_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^worker: "):
        worker_url(text)


def test_several_workers_in_one_text_are_refused() -> None:
    with pytest.raises(ConfigError, match="worker: 'http://a:1,http://b:2': one URL is expected"):
        worker_url("http://a:1,http://b:2")


def test_a_prefill_worker_has_a_bootstrap_port() -> None:
    assert prefill_worker("a:1, 8998", "sglang") == WorkerSpec("http://a:1", "prefill", "sglang", 8998)
    assert prefill_worker("a:1").bootstrap_port is None
    for text in ("a:1,", "a:1,-1", "a:1,0", "a:1,²", "a:1,1,2"):
        with pytest.raises(ConfigError, match=r"^(prefill|bootstrap-port): "):
            prefill_worker(text)
    with pytest.raises(ConfigError, match="only a prefill worker has one"):
        WorkerSpec("a:1", "decode", bootstrap_port=1)


def test_roles_and_kinds_are_named() -> None:
    with pytest.raises(ConfigError, match="role: 'both' must be one of mixed, prefill, decode"):
        WorkerSpec("a:1", "both")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="kind: 'x' must be one of auto, equipoise, sglang, vllm, openai"):
        WorkerSpec("a:1", kind="x")  # type: ignore[arg-type]
