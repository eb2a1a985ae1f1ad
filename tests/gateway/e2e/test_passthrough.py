"""What goes through the gateway is what went in: bytes, headers, statuses."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest
from tests.gateway.client import CHAT, COMPLETIONS, GENERATE, Reply, ask, ask_now, chat, completion, gather, read
from tests.server.raw import chunked_bytes

if TYPE_CHECKING:
    from tests.gateway.processes import Fleet, Gateway, Worker

GATEWAYS_OWN = ("x-request-id", "date", "server", "connection", "keep-alive")
GENERATE_BODY = {"text": "abc", "sampling_params": {"max_new_tokens": 9}}
REQUESTS = [
    (CHAT, chat(max_tokens=9)),
    (CHAT, chat(max_tokens=9, stream=True)),
    (CHAT, chat(max_tokens=9, stream=True, stream_options={"include_usage": True})),
    (COMPLETIONS, completion(max_tokens=9)),
    (COMPLETIONS, completion("\u00e9\u4e2d" * 500, max_tokens=200, stream=True)),
    (GENERATE, GENERATE_BODY),
    (GENERATE, {**GENERATE_BODY, "stream": True, "return_logprob": True}),
    ("/v1/embeddings", {"model": "test-model", "input": "abc"}),
    ("/v1/embeddings", {"model": "test-model", "input": ""}),
    (CHAT, chat(max_tokens=-1)),
    (CHAT, chat(routed_dp_rank=77)),
]


@pytest.fixture(scope="module")
def worker(shared_fleet: Fleet) -> Worker:
    worker = shared_fleet.sglang("--dp-size", "2", "--answer-tokens", "400").wait_ready()
    worker.change(token_s=0.0005)
    return worker


@pytest.fixture(scope="module")
def gateway(shared_fleet: Fleet, worker: Worker) -> Gateway:
    return shared_fleet.before([worker], "--max-body-mb", "2")


def passed_on(reply: Reply) -> dict[str, str]:
    """The headers that are the worker's affair."""
    return {name: value for name, value in reply.headers.items() if name not in GATEWAYS_OWN}


@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_answers_are_the_workers_byte_for_byte(
    gateway: Gateway, worker: Worker, path: str, body: dict[str, object]
) -> None:
    here, there = ask_now(gateway.port, path, body), ask_now(worker.port, path, body)
    assert here.body == there.body
    assert here.is_whole
    assert (here.status, passed_on(here)) == (there.status, passed_on(there))
    assert here.headers["x-request-id"]


def test_a_hundred_streams_at_once_are_identical_to_the_workers(gateway: Gateway, worker: Worker) -> None:
    async def both() -> tuple[list[Reply], list[Reply]]:
        bodies = [completion(f"p{number}", max_tokens=20 + number, stream=True) for number in range(100)]
        return (
            await gather(*(ask(gateway.port, COMPLETIONS, body) for body in bodies)),
            await gather(*(ask(worker.port, COMPLETIONS, body) for body in bodies)),
        )

    here, there = asyncio.run(both())
    assert [reply.body for reply in here] == [reply.body for reply in there]
    assert all(reply.is_done() for reply in here)


@pytest.mark.parametrize("path", ["/v1/rerank", "/v1/score", "/v1/responses", "/v1/messages"])
def test_other_routes(gateway: Gateway, path: str) -> None:
    body = '{ "model":"test-model", "routed_dp_rank":1,  "odd" : [1,2 ] }'
    reply = ask_now(gateway.port, path, body.encode())
    assert reply.status == 200
    assert reply.json() == {"path": path, "echo": body}


def test_tokenize(gateway: Gateway) -> None:
    assert ask_now(gateway.port, "/tokenize", {"model": "test-model", "prompt": "a"}).json()["count"] == 16


def test_the_worker_gets_the_clients_headers_but_those_of_the_connection(gateway: Gateway, worker: Worker) -> None:
    sent = {"X_Custom": "one two", "Authorization": "Bearer abc", "X_Hop": "1", "Connection": "X-Hop", "TE": "trailers"}
    assert ask_now(gateway.port, CHAT, chat("headers"), **sent, Content_Encoding="identity").status == 200
    seen = dict(worker.seen()[-1]["headers"])
    assert seen["x-custom"] == "one two"
    assert seen["authorization"] == "Bearer abc"
    assert seen["host"] == f"127.0.0.1:{worker.port}"
    assert "x-hop" not in seen
    assert "te" not in seen
    assert seen["x-request-id"]


def test_a_body_is_spliced_not_written_anew(gateway: Gateway, worker: Worker) -> None:
    odd = b'{ "model" : "test-model","messages":[ {"role":"user","content":"\\u00e9 }{"} ],  "seed":1.0e0 }'
    assert ask_now(gateway.port, CHAT, odd).status == 200
    got = worker.seen()[-1]["body"].encode()
    rank = json.loads(got)["routed_dp_rank"]
    assert f'"routed_dp_rank":{rank}'.encode() in got.replace(b": ", b":")
    start, end = odd.rstrip()[:-1].rstrip(), got.replace(b" ", b"")
    assert start.replace(b" ", b"").lstrip(b"{").rstrip(b"}") in end
    assert b'"seed":1.0e0' in end


def send(port: int, *pieces: bytes, num_replies: int = 1) -> list[Reply]:
    """Write `pieces` one after the other and read answers."""

    async def run() -> list[Reply]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0.01)
        replies = [Reply() for _ in range(num_replies)]
        async with asyncio.timeout(20):
            for reply in replies:
                await read(reader, reply)
        writer.close()
        return replies

    return asyncio.run(run())


def test_a_chunked_request(gateway: Gateway, worker: Worker) -> None:
    body = json.dumps(chat("chunked", max_tokens=3)).encode()
    (reply,) = send(gateway.port, chunked_bytes(CHAT, [body[:10], body[10:11], body[11:]]))
    assert reply.body == ask_now(worker.port, CHAT, body).body


def test_a_request_in_many_pieces(gateway: Gateway) -> None:
    body = json.dumps(chat("pieces", max_tokens=3)).encode()
    whole = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    (reply,) = send(gateway.port, *(whole[start : start + 7] for start in range(0, len(whole), 7)))
    assert reply.status == 200


def test_expect_continue(gateway: Gateway) -> None:
    body = json.dumps(chat(max_tokens=3)).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\nExpect: 100-continue\r\n\r\n".encode()

    async def run() -> tuple[bytes, Reply]:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(head)
        async with asyncio.timeout(20):
            interim = await reader.readuntil(b"\r\n\r\n")
            writer.write(body)
            await read(reader, reply := Reply())
        writer.close()
        return interim, reply

    interim, reply = asyncio.run(run())
    assert interim.startswith(b"HTTP/1.1 100")
    assert reply.status == 200


def test_a_body_beyond_the_limit_is_a_413(gateway: Gateway, worker: Worker) -> None:
    before = worker.num_seen()
    reply = ask_now(gateway.port, CHAT, chat("x" * (3 << 20)))
    assert reply.status == 413
    assert "message" in reply.error()
    assert worker.num_seen() == before


def test_a_large_body_arrives_whole(gateway: Gateway, worker: Worker) -> None:
    body = json.dumps({"model": "test-model", "input": "y" * (1 << 20)}).encode()
    assert body[1:-1] in ask_now(gateway.port, "/v1/responses", body).json()["echo"].encode()


def test_errors_of_the_gateway_have_the_shape_of_their_route(gateway: Gateway) -> None:
    body = {"model": "none", "messages": [], "max_tokens": 1}
    ours, anthropic = (ask_now(gateway.port, path, body).json() for path in (CHAT, "/v1/messages"))
    assert ours["error"]["code"] == "model_not_found"
    assert anthropic["type"] == "error"
    assert anthropic["error"]["type"] == "not_found_error"
    assert "test-model" in anthropic["error"]["message"]


def test_unknown_routes_and_bodies(gateway: Gateway) -> None:
    assert ask_now(gateway.port, "/nowhere", {}).status == 404
    assert ask_now(gateway.port, CHAT, b"{not json").status == 400
    assert ask_now(gateway.port, CHAT, b"[1, 2]").status == 400
    assert ask_now(gateway.port, CHAT, None, method="GET").status in (404, 405)
