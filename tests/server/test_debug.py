"""Why a request waits, asked of a real server."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest
from tests.serving import serve, sim_flags, write_tiny_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.serving import Server


@pytest.fixture(scope="module")
def narrow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One seat: whoever comes second waits."""
    folder = write_tiny_tokenizer(tmp_path_factory.mktemp("narrow"))
    with serve(*sim_flags(folder, "--max-running", "1", "--trace-steps", "8", step_ms=5.0)) as server:
        yield server


def get(server: Server, path: str) -> Any:
    with urllib.request.urlopen(server.url + path, timeout=30) as answer:
        return json.load(answer)


def post_in_background(server: Server, name: str, max_tokens: int) -> threading.Thread:
    """A completion under the request id `name`, whose answer nobody reads."""
    body = json.dumps({"prompt": "abc", "max_tokens": max_tokens, "ignore_eos": True}).encode()
    request = urllib.request.Request(server.url + "/v1/completions", body, {"X-Request-Id": name})
    thread = threading.Thread(target=lambda: urllib.request.urlopen(request, timeout=30).read())
    thread.start()
    return thread


def explanation(server: Server, name: str, place: str, held_by: str) -> dict[str, Any]:
    """What /debug/requests says of `name` once it is in `place`, held by `held_by`."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            [found] = get(server, f"/debug/requests/{name}")["requests"]
        except urllib.error.HTTPError:
            found = {}
        if (found.get("place"), found.get("held_by")) == (place, held_by):
            return dict(found)
        time.sleep(0.01)
    raise AssertionError(f"{name} never was {place}, held by {held_by!r}: {found}")


def test_a_waiting_request_is_told_the_rule_that_holds_it_back(narrow_server: Server) -> None:
    first = post_in_background(narrow_server, "first", 200)
    explanation(narrow_server, "first", "decoding", "")
    others = [post_in_background(narrow_server, "second", 1)]
    second = explanation(narrow_server, "second", "waiting", "max_running")
    others.append(post_in_background(narrow_server, "third", 1))
    third = explanation(narrow_server, "third", "waiting", "order")
    assert second["held_for_s"] >= 0
    assert (third["num_ahead"], third["head_held_by"]) == (1, "max_running")
    for thread in (first, *others):
        thread.join()


def test_decisions_name_who_was_admitted_and_what_held_the_rest(narrow_server: Server) -> None:
    threads = [post_in_background(narrow_server, name, 1) for name in ("one", "two")]
    for thread in threads:
        thread.join()
    decisions = get(narrow_server, "/debug/decisions")["decisions"]
    assert 0 < len(decisions) <= 8
    admitted = [name for decision in decisions for name in decision.get("admitted", [])]
    assert {"one", "two"} <= set(admitted)


def test_a_request_that_ended_is_not_found(narrow_server: Server) -> None:
    with pytest.raises(urllib.error.HTTPError) as raised:
        get(narrow_server, "/debug/requests/gone")
    assert raised.value.code == 404
    assert json.load(raised.value)["error"]["message"] == "no request 'gone' runs or waits here"


def test_decisions_are_kept_only_on_request(sim_server: Server) -> None:
    with pytest.raises(urllib.error.HTTPError) as raised:
        get(sim_server, "/debug/decisions")
    assert raised.value.code == 404
    assert "--trace-steps" in json.load(raised.value)["error"]["message"]
