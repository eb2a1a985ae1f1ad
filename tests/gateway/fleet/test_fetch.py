"""The gateway's own requests: whole answers, errors in one clause, bounds."""

from __future__ import annotations

import asyncio

import pytest
from tests.gateway.scripted import Reply, in_loop, pool_to, serving, site_of, until

from equipoise.gateway.fleet.fetch import MAX_ANSWER_BYTES, FetchError, Site


@in_loop
async def test_an_answer_is_whole_whatever_its_size_and_status() -> None:
    big = b"x" * 3_000_000
    async with serving({"/big": Reply(big), "/no": Reply({"error": 1}, 503)}) as server:
        site = site_of(server)
        answer = await site.get("/big")
        assert (answer.status, answer.is_ok, answer.body) == (200, True, big)
        answer = await site.get("/no")
        assert (answer.status, answer.is_ok, answer.json()) == (503, False, {"error": 1})


@in_loop
async def test_requests_carry_key_and_body() -> None:
    async with serving({"/a": Reply(), "/b": Reply(b"{")}) as server:
        site = site_of(server, api_key="secret")
        await site.get("/a")
        assert server.headers["/a"]["authorization"] == "Bearer secret"
        answer = await site.post("/b", b'{"a": 1}', [(b"X-Rank", b"3")])
        sent = server.headers["/b"]
        assert (sent["content-type"], sent["x-rank"], sent["content-length"]) == ("application/json", "3", "8")
        with pytest.raises(FetchError, match="not JSON"):
            answer.json()


@in_loop
async def test_a_server_that_hangs_is_given_up_in_time_and_the_next_request_is_answered() -> None:
    async with serving({"/a": Reply(delay_s=3600.0), "/b": Reply()}) as server:
        site = site_of(server, timeout_s=0.05)
        with pytest.raises(FetchError, match=r"no answer to /a within 0\.05 s"):
            await site.get("/a")
        await until(lambda: server.num_left == 1)
        assert (await site_of(server).get("/b")).is_ok


@in_loop
async def test_no_server_is_an_error_at_once() -> None:
    async with serving({}) as server:
        pass
    with pytest.raises(FetchError, match="connect"):
        await Site(server.url, pool_to("127.0.0.1", server.port), 20.0).get("/")


@in_loop
async def test_an_endless_answer_is_cut() -> None:
    async with serving({"/a": Reply(b"x" * (MAX_ANSWER_BYTES + 1)), "/b": Reply(b"x" * MAX_ANSWER_BYTES)}) as server:
        site = site_of(server)
        with pytest.raises(FetchError, match="the answer is over"):
            await site.get("/a")
        assert len((await site.get("/b")).body) == MAX_ANSWER_BYTES


@in_loop
async def test_giving_up_ends_the_request() -> None:
    async with serving({"/a": Reply(delay_s=3600.0)}) as server:
        site = site_of(server)
        task = asyncio.create_task(site.get("/a"))
        await until(lambda: server.served == ["/a"])
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: server.num_left == 1)
