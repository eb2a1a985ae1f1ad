"""The two legs of a request: what ends with what, who is told, who is blamed, and that all is given back."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.gateway.pair_kit import EVENT, JSON, SSE, FakeCall, PairStage, pair_stage
from tests.gateway.plane_kit import post
from tests.gateway.scripted import in_loop

from equipoise.gateway.relay.pair import MAX_LINGER_S
from equipoise.gateway.relay.plane import PlaneLimits

if TYPE_CHECKING:
    from equipoise.gateway.fleet.router import Outcome

Role = Literal["prefill", "decode"]
STREAM = {"model": "m", "messages": [], "stream": True, "max_tokens": 5}
LEGS: list[tuple[int, Role]] = [(0, "prefill"), (1, "decode")]
LOGPROBS = {"text": "a b", "return_logprob": True, "sampling_params": {"max_new_tokens": 1}}


def outcomes(stage: PairStage, role: Role) -> dict[Outcome, int]:
    """How the legs of a role went."""
    found: dict[Outcome, int] = {}
    for (leg_role, _, outcome), count in stage.metrics.legs.items():
        if leg_role == role:
            found[outcome] = found.get(outcome, 0) + count
    return found


@in_loop
async def test_the_answer_is_the_decode_workers() -> None:
    async with pair_stage() as stage:
        client = stage.client()
        prefill, decode = stage.legs()
        prefill.answer(200, b'{"prefill":1}')
        decode.answer(200, b'{"decode": 1}')
        assert client.answers() == [(200, b'{"decode": 1}')]
        assert outcomes(stage, "prefill") == outcomes(stage, "decode") == {"ok": 1}


@in_loop
async def test_streams_pass_piece_by_piece() -> None:
    async with pair_stage() as stage:
        client = stage.client(STREAM)
        prefill, decode = stage.legs()
        decode.head(200, SSE)
        prefill.head(200, SSE)
        prefill.body(b"data: not for you\n\n")
        decode.body(EVENT)
        assert client.sent.endswith(b"\r\n%b\r\n" % EVENT)
        prefill.end()
        decode.body(EVENT)
        decode.end()
        assert client.answers() == [(200, EVENT * 2)]


@in_loop
async def test_each_leg_is_charged_with_its_part_until_it_ends() -> None:
    async with pair_stage(1, 1) as stage:
        stage.client({"model": "m", "prompt": list(range(100)), "max_tokens": 7}, "/v1/completions")
        first, second = stage.workers
        assert (stage.charged(first), stage.charged(second)) == (100, 107)
        prefill, decode = stage.legs()
        prefill.answer()
        assert (stage.charged(first), stage.charged(second)) == (0, 107)
        decode.answer()
        assert stage.charged(second) == 0


@pytest.mark.parametrize(("place", "role"), LEGS)
@pytest.mark.parametrize("phase", ["connect", "send", "worker"])
@pytest.mark.parametrize("has_decode_head", [False, True])
def test_a_leg_that_fails_ends_the_other_and_another_pair_is_tried(
    place: int, role: Role, phase: Literal["connect", "send", "worker"], has_decode_head: bool
) -> None:
    @in_loop
    async def run() -> None:
        async with pair_stage() as stage:
            client = stage.client(STREAM)
            legs = stage.legs()
            if has_decode_head:
                legs[1].head(200, SSE)
            legs[place].fail(phase)
            assert legs[1 - place].is_aborted
            await stage.settle()
            prefill, decode = stage.legs()
            assert not set(legs) & {prefill, decode}
            assert [len(transport.calls) for transport in stage.transports] == [1, 1, 1, 1]
            prefill.answer()
            decode.answer(200, b"second")
            assert client.answers() == [(200, b"second")]
            assert outcomes(stage, role) == {"failed": 1, "ok": 1}
            assert outcomes(stage, "decode" if role == "prefill" else "prefill") == {"cancelled": 1, "ok": 1}
            assert stage.metrics.retries[phase] == 1

    run()


@pytest.mark.parametrize(("place", "role"), LEGS)
@pytest.mark.parametrize("status", [408, 429, 500, 503])
@pytest.mark.parametrize("has_decode_head", [False, True])
def test_answers_of_the_moment_are_tried_elsewhere(place: int, role: Role, status: int, has_decode_head: bool) -> None:
    @in_loop
    async def run() -> None:
        async with pair_stage() as stage:
            client = stage.client(STREAM)
            legs = stage.legs()
            if has_decode_head and place == 0:
                legs[1].head(200, SSE)
            legs[place].head(status)
            assert legs[1 - place].is_aborted  # before the error's body is read
            legs[place].body(b"busy")
            legs[place].end()
            await stage.settle()
            prefill, decode = stage.legs()
            prefill.answer()
            decode.answer(200, b"fine")
            assert client.answers() == [(200, b"fine")]
            assert stage.metrics.retries[str(status)] == 1

    run()


@pytest.mark.parametrize(("place", "role"), LEGS)
def test_what_either_leg_refuses_goes_to_the_client(place: int, role: Role) -> None:
    @in_loop
    async def run() -> None:
        async with pair_stage() as stage:
            client = stage.client()
            legs = stage.legs()
            legs[place].answer(422, b'{"detail": "no"}')
            assert legs[1 - place].is_aborted
            assert client.answers() == [(422, b'{"detail": "no"}')]
            assert outcomes(stage, role) == {"refused": 1}
            worker = next(worker for worker in stage.workers if worker.role == role)
            assert stage.metrics.requests == {("/v1/chat/completions", worker.url, 422): 1}
            assert worker.breaker.state == "closed"

    run()


@pytest.mark.parametrize(("place", "role"), LEGS)
def test_the_last_error_of_a_worker_is_passed_on(place: int, role: Role) -> None:
    @in_loop
    async def run() -> None:
        async with pair_stage(max_retries=1) as stage:
            client = stage.client()
            for _ in range(2):
                stage.legs()[place].answer(500, b"broken")
                await stage.settle()
            assert client.answers() == [(500, b"broken")]

    run()


@pytest.mark.parametrize(("place", "role"), LEGS)
def test_a_stream_under_way_is_cut_and_says_why(place: int, role: Role) -> None:
    @in_loop
    async def run() -> None:
        async with pair_stage() as stage:
            client = stage.client(STREAM)
            legs = stage.legs()
            legs[1].head(200, SSE)
            legs[1].body(EVENT)
            legs[place].fail("worker", "it broke")
            assert legs[1 - place].is_aborted
            await stage.settle()
            assert client.is_closed
            assert client.answers() == []
            assert f"{role} worker http://{role}-".encode() in client.sent
            assert b'data: {"error"' in client.sent
            assert len(stage.calls("prefill")) == 1
            assert outcomes(stage, role) == {"failed": 1}

    run()


@pytest.mark.parametrize("place", [0, 1])
def test_both_workers_of_a_pair_that_failed_are_avoided(place: int) -> None:
    @in_loop
    async def run() -> None:
        async with pair_stage(worker_policy="consistent_hashing") as stage:
            for _ in range(3):  # one session's requests go to the same workers
                stage.client(None, "/v1/chat/completions", "X-Session-Id: a")
                stage.legs()[place].fail()
                await stage.settle()
                for leg in stage.legs():
                    leg.answer()
            assert [len(transport.calls) for transport in stage.transports] == [3, 3, 3, 3]

    run()


@in_loop
async def test_an_error_of_the_prefill_worker_under_way_cuts_too() -> None:
    async with pair_stage() as stage:
        client = stage.client(STREAM)
        prefill, decode = stage.legs()
        decode.head(200, SSE)
        decode.body(EVENT)
        prefill.head(500)
        assert prefill.is_aborted
        assert decode.is_aborted
        await stage.settle()
        assert client.is_closed
        assert b"it answered 500" in client.sent


@pytest.mark.parametrize("is_prefilled", [False, True])
@pytest.mark.parametrize("has_begun", [False, True])
def test_a_client_that_leaves_ends_both(is_prefilled: bool, has_begun: bool) -> None:
    @in_loop
    async def run() -> None:
        async with pair_stage() as stage:
            client = stage.client(STREAM)
            prefill, decode = stage.legs()
            if is_prefilled:
                prefill.answer()
            if has_begun:
                decode.head(200, SSE)
                decode.body(EVENT)
            client.leave()
            assert decode.is_aborted
            assert prefill.is_aborted is not is_prefilled
            stage.assert_at_rest()
            assert outcomes(stage, "decode") == {"cancelled": 1}
            assert stage.metrics.num_clients_gone == 1

    run()


@pytest.mark.parametrize("is_prefilled", [False, True])
def test_a_limit_of_time_names_leg_and_phase(is_prefilled: bool) -> None:
    @in_loop
    async def run() -> None:
        async with pair_stage(limits=PlaneLimits(first_token_s=10.0)) as stage:
            client = stage.client(STREAM)
            prefill, decode = stage.legs()
            decode.head(200, SSE)
            if is_prefilled:
                prefill.answer()
            stage.sweep_at(11.0)
            assert not prefill.is_live
            assert decode.is_aborted
            blamed = "decode worker http://decode-2:1 failed in phase first_token"
            assert client.error().startswith(
                blamed if is_prefilled else f"prefill worker http://prefill-0:1 or {blamed}"
            )
            assert outcomes(stage, "prefill") == {"ok" if is_prefilled else "unclear": 1}
            assert outcomes(stage, "decode") == {"failed" if is_prefilled else "unclear": 1}
            assert client.answers()[0][0] == 504

    run()


@in_loop
async def test_silence_in_a_stream_is_the_decode_workers() -> None:
    async with pair_stage(limits=PlaneLimits(between_tokens_s=10.0)) as stage:
        client = stage.client(STREAM)
        prefill, decode = stage.legs()
        decode.head(200, SSE)
        decode.body(EVENT)
        stage.sweep_at(0.0)
        stage.sweep_at(11.0)
        await stage.settle()
        assert prefill.is_aborted
        assert b"decode worker" in client.sent
        assert b"between_tokens" in client.sent
        assert outcomes(stage, "prefill") == {"cancelled": 1}


@pytest.mark.parametrize("how", ["ends", "fails", "refuses", "hangs"])
def test_a_prefill_leg_may_end_after_the_answer(how: str) -> None:
    @in_loop
    async def run() -> None:
        async with pair_stage() as stage:
            client = stage.client()
            prefill, decode = stage.legs()
            decode.answer(200, b"done")
            assert client.answers() == [(200, b"done")]
            assert prefill.is_live
            assert stage.charged(stage.workers[0])
            if how == "ends":
                prefill.answer()
            elif how == "fails":
                prefill.fail()
            elif how == "refuses":
                prefill.head(500)
            else:
                stage.sweep_at(MAX_LINGER_S - 1)
                assert prefill.is_live
                stage.sweep_at(MAX_LINGER_S + 1)
                assert prefill.is_aborted
            outcome = {"ends": "ok", "hangs": "cancelled"}.get(how, "failed")
            assert outcomes(stage, "prefill") == {outcome: 1}
            assert client.num_ends() == 1

    run()


@in_loop
async def test_a_late_prefill_leg_says_nothing_to_the_next_answer() -> None:
    async with pair_stage() as stage:
        client = stage.client()
        late, decode = stage.legs()
        decode.answer(200, b"first")
        client.ask(post(b'{"model":"m"}'))
        prefill, decode = (stage.calls(role)[-1] for role in ("prefill", "decode"))
        decode.head(200, SSE)  # waits for the first piece
        late.head(500)
        prefill.answer()
        decode.body(EVENT)
        decode.end()
        assert client.answers() == [(200, b"first"), (200, EVENT)]


@in_loop
async def test_an_answer_that_was_given_up_is_not_counted() -> None:
    async with pair_stage() as stage:
        client = stage.client(STREAM)
        prefill, decode = stage.legs()
        decode.head(200, SSE)
        prefill.answer(500)
        client.leave()  # before the next try
        assert not stage.metrics.requests


@in_loop
async def test_back_pressure_holds_the_decode_leg_alone() -> None:
    async with pair_stage() as stage:
        client = stage.client(STREAM)
        prefill, decode = stage.legs()
        decode.head(200, SSE)
        client.slow_down()
        assert (prefill.is_paused, decode.is_paused) == (False, True)
        client.catch_up()
        assert not decode.is_paused
        prefill.answer()
        decode.end()


@in_loop
async def test_the_breaker_hears_of_the_leg_that_failed() -> None:
    async with pair_stage(1, 1, max_retries=0) as stage:
        for _ in range(10):
            stage.client()
            stage.legs()[0].fail()
        assert [worker.breaker.state for worker in stage.workers] == ["open", "closed"]
        client = stage.client()
        assert "no prefill worker" in client.error()


@in_loop
async def test_silence_opens_no_breaker_where_it_may_be_the_others_and_ejects_who_is_silent_most() -> None:
    async with pair_stage(1, 3, limits=PlaneLimits(first_token_s=10.0)) as stage:
        for _ in range(20):
            for place in range(3):
                stage.client()
                prefill, decode = stage.legs()
                if place == 0:
                    stage.sweep_at(11.0)
                else:
                    prefill.answer()
                    decode.answer()
        assert {worker.breaker.state for worker in stage.workers} == {"closed"}
        stage.fleet.tick(stage.loop.time() + 11.0)
        assert [worker.record.ejected_until > 0 for worker in stage.workers] == [False, True, False, False]


# Log-probabilities


def generated(logprobs: str, text: str = "x") -> bytes:
    return f'{{"text": "{text}", "meta_info": {{"id": 1.0, "input_token_logprobs": [{logprobs}]}}}}'.encode()


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_logprobs_of_the_prompt_are_merged(first: Role) -> None:
    @in_loop
    async def run() -> None:
        async with pair_stage() as stage:
            client = stage.client(LOGPROBS, "/generate", "Accept-Encoding: gzip")
            legs = stage.legs()
            assert all(b"Accept-Encoding" not in dict(leg.outgoing.headers) for leg in legs)
            answers = (generated("[-1,5,null]", "p"), generated("[-2,6,null]", "d"))
            for place in (0, 1) if first == "prefill" else (1, 0):
                assert client.sent == b""
                legs[place].answer(200, answers[place])
            ((status, body),) = client.answers()
            assert status == 200
            assert body == b'{"text":"d","meta_info":{"id":1.0,"input_token_logprobs":[[-1,5,null],[-2,6,null]]}}'
            assert b"content-length: %d\r\n" % len(body) in client.sent

    run()


@pytest.mark.parametrize("prefill_after", range(5))
def test_logprobs_are_merged_into_each_event(prefill_after: int) -> None:
    @in_loop
    async def run() -> None:
        async with pair_stage() as stage:
            client = stage.client({**LOGPROBS, "stream": True}, "/generate")
            prefill, decode = stage.legs()
            stream = b"data: " + generated("") + b"\n\ndata: " + generated("[9]") + b"\n\ndata: [DONE]\n\n"
            steps = [lambda: decode.head(200, SSE), lambda: decode.body(stream[:40]), lambda: decode.body(stream[40:])]
            for place, step in enumerate([*steps, decode.end, lambda: None]):
                if place == prefill_after:
                    prefill.answer(200, b"data: " + generated("[-1]", "p") + b"\n\ndata: [DONE]\n\n", SSE)
                step()
            ((_, body),) = client.answers()
            events = [event.removeprefix(b"data: ") for event in body.split(b"\n\n")]
            merged = [json.loads(event)["meta_info"]["input_token_logprobs"] for event in events[:2]]
            assert merged == [[[-1]], [[-1], [9]]]
            assert events[2:] == [b"[DONE]", b""]

    run()


@in_loop
async def test_events_that_were_held_go_out_at_once() -> None:
    async with pair_stage() as stage:
        client = stage.client({**LOGPROBS, "stream": True}, "/generate")
        prefill, decode = stage.legs()
        decode.head(200, SSE)
        decode.body(b"data: " + generated("[2]") + b"\n\n")
        assert client.sent == b""
        prefill.answer(200, generated("[1]"))
        assert b'"input_token_logprobs":[[1],[2]]' in client.sent
        decode.end()


@in_loop
async def test_a_prefill_answer_that_is_no_json_fails_the_pair() -> None:
    async with pair_stage(max_retries=0) as stage:
        client = stage.client(LOGPROBS, "/generate")
        prefill, decode = stage.legs()
        prefill.answer(200, b"<html>")
        assert decode.is_aborted
        assert "not JSON" in client.error()


@in_loop
async def test_errors_pass_where_logprobs_were_asked_for() -> None:
    async with pair_stage() as stage:
        for place in (0, 1):
            client = stage.client(LOGPROBS, "/generate")
            stage.legs()[place].answer(400, b'{"error": 1}')
            assert client.answers() == [(400, b'{"error": 1}')]


# Whatever happens

STATUSES = (200, 200, 200, 302, 400, 429, 500)
STEPS = st.one_of(
    st.tuples(st.sampled_from(("prefill", "decode")), st.sampled_from(("body", "end", "connect", "send", "worker"))),
    st.tuples(st.sampled_from(("prefill", "decode")), st.sampled_from(STATUSES)),
    st.tuples(st.just("gateway"), st.sampled_from(("slow", "fast", "look", "time"))),
    st.tuples(st.just("client"), st.just("leave")),
)
BODIES = ({"model": "m", "prompt": "a"}, STREAM, LOGPROBS, {**LOGPROBS, "stream": True})


def play(call: FakeCall, event: str | int, is_stream: bool) -> None:
    """One event of a leg, where its protocol allows it."""
    if isinstance(event, int):
        if not call.has_head:
            call.head(event, SSE if is_stream and event == 200 else JSON)
    elif event in ("connect", "send", "worker"):
        if event == "worker" or not call.has_head:
            call.fail(event)  # type: ignore[arg-type]
    elif call.has_head:
        if event == "end":
            call.end()
        else:
            call.body(b"data: " + generated("[1]") + b"\n\n" if is_stream else generated("[1]"))


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 3), st.lists(STEPS, max_size=24))
def test_all_is_given_back_whatever_happens(body: int, steps: list[tuple[str, str | int]]) -> None:
    @in_loop
    async def run() -> None:
        limits = PlaneLimits(first_token_s=50.0, between_tokens_s=50.0)
        async with pair_stage(limits=limits, max_retries=2) as stage:
            asked = BODIES[body]
            client = stage.client(asked, "/generate" if body >= 2 else "/v1/completions")  # type: ignore[arg-type]
            for who, what in steps:
                live = [call for call in stage.calls(who) if call.is_live] if who in ("prefill", "decode") else []  # type: ignore[arg-type]
                assert len(live) <= 1
                if live:
                    play(live[0], what, bool(asked.get("stream")))
                elif who == "client":
                    client.leave()
                elif what in ("slow", "fast"):
                    client.slow_down() if what == "slow" else client.catch_up()
                else:
                    stage.sweep_at(100.0 if what == "time" else 1.0)
                await stage.settle()
            has_left = client.is_closed
            stage.plane.close()
            stage.fleet.close()
            await stage.settle()
            assert has_left or client.num_ends() == 1
            assert client.num_ends() <= 1

    run()
