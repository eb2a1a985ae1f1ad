"""Which workers a request goes to in a fleet with prefill and decode workers, and what they are told."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.gateway.pair_kit import PairStage, pair_stage
from tests.gateway.scripted import in_loop

CHAT = "/v1/chat/completions"
RANK = b"x-data-parallel-rank"


def told(stage: PairStage, **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What both legs of a request are told beside its own fields."""
    own = {"model": "m", **more}
    stage.client(own, "/v1/completions")
    legs = stage.legs()
    added = []
    for leg in legs:
        fields = leg.fields
        assert {name: fields[name] for name in own} == own
        added.append({name: value for name, value in fields.items() if name not in own})
        leg.answer()
    return added[0], added[1]


@in_loop
async def test_both_legs_are_told_where_to_meet() -> None:
    async with pair_stage(1, 1) as stage:
        first, second = told(stage, prompt="a"), told(stage, prompt="a")
        for prefill, decode in (first, second):
            assert prefill == decode
            assert (prefill["bootstrap_host"], prefill["bootstrap_port"]) == ("prefill-0", 8998)
            assert 0 <= prefill["bootstrap_room"] < 2**63
        assert first != second


@in_loop
async def test_each_try_meets_in_a_room_of_its_own() -> None:
    async with pair_stage() as stage:
        stage.client()
        prefill, _ = stage.legs()
        room = prefill.fields["bootstrap_room"]
        prefill.fail("connect")
        await stage.settle()
        again, decode = stage.legs()
        assert again.fields["bootstrap_room"] == decode.fields["bootstrap_room"] != room
        again.answer()
        decode.answer()


@pytest.mark.parametrize(
    ("own", "num_rooms"),
    [
        ({"prompt": ["a", "b", "c"]}, 3),
        ({"prompt": [[1], [2, 3]]}, 2),
        ({"prompt": ["a"]}, 1),
        ({"prompt": "a", "n": 2}, 2),
    ],
)
def test_each_prompt_of_a_batch_has_a_room(own: dict[str, Any], num_rooms: int) -> None:
    @in_loop
    async def run() -> None:
        async with pair_stage(1, 1) as stage:
            prefill, decode = told(stage, **own)
            assert prefill == decode
            assert len(set(prefill["bootstrap_room"])) == num_rooms
            assert prefill["bootstrap_host"] == ["prefill-0"] * num_rooms
            assert prefill["bootstrap_port"] == [8998] * num_rooms

    run()


@in_loop
async def test_each_leg_is_told_its_rank_and_decode_the_prefills_too() -> None:
    async with pair_stage(0, 0) as stage:
        stage.join("prefill", num_ranks=3)
        stage.join("decode", num_ranks=2)
        for turn in range(6):
            stage.client()
            prefill, decode = stage.legs()
            ranks = (turn % 3, turn % 2)
            assert (prefill.rank, decode.rank) == tuple(b"%d" % rank for rank in ranks)
            assert (prefill.fields["routed_dp_rank"], decode.fields["routed_dp_rank"]) == ranks
            assert decode.fields["disagg_prefill_dp_rank"] == ranks[0]
            assert "disagg_prefill_dp_rank" not in prefill.fields
            prefill.answer()
            decode.answer()


@in_loop
async def test_follow_room_follows_the_room() -> None:
    async with pair_stage(1, 1, num_ranks=4, rank_policy="follow_room") as stage:
        for _ in range(10):
            prefill, decode = told(stage, prompt="a")
            rank = prefill["bootstrap_room"] % 4
            assert prefill["routed_dp_rank"] == decode["routed_dp_rank"] == decode["disagg_prefill_dp_rank"] == rank


@in_loop
async def test_one_rank_is_never_named() -> None:
    async with pair_stage() as stage:
        for added in told(stage, prompt="a"):
            assert set(added) == {"bootstrap_host", "bootstrap_port", "bootstrap_room"}


@in_loop
async def test_ranks_that_the_client_names_are_respected() -> None:
    async with pair_stage(1, 1, num_ranks=4) as stage:
        prefill, decode = told(stage, prompt="a", routed_dp_rank=2)
        assert "routed_dp_rank" not in prefill
        assert decode["disagg_prefill_dp_rank"] == 2
        prefill, decode = told(stage, prompt="a", disagg_prefill_dp_rank=3)
        assert prefill["routed_dp_rank"] == 3
        assert "disagg_prefill_dp_rank" not in decode
        stage.client(None, CHAT, "X-Data-Parallel-Rank: 1")
        legs = stage.legs()
        assert [leg.rank for leg in legs] == [b"1", b"1"]
        assert all("routed_dp_rank" not in leg.fields for leg in legs)
        for leg in legs:
            leg.answer()
        stage.client({"model": "m", "disagg_prefill_dp_rank": 3}, CHAT, "X-Data-Parallel-Rank: 1")
        legs = stage.legs()
        named = [[value for name, value in leg.outgoing.headers if name.lower() == RANK] for leg in legs]
        assert named == [[b"3"], [b"1"]]
        for leg in legs:
            leg.answer()


@pytest.mark.parametrize("name", ["bootstrap_host", "bootstrap_port", "bootstrap_room"])
def test_rooms_that_the_client_names_are_refused(name: str) -> None:
    @in_loop
    async def run() -> None:
        async with pair_stage() as stage:
            client = stage.client({"model": "m", name: 7})
            ((status, body),) = client.answers()
            assert status == 400
            assert json.loads(body)["error"]["param"] == name
            told(stage, prompt="a")
            stage.client({"model": "m", "prompt": "a", name: None})  # is not named
            for leg in stage.legs():
                assert leg.fields[name] is not None
                leg.answer()

    run()


@in_loop
async def test_nothing_stays_charged_when_one_role_is_missing() -> None:
    async with pair_stage(1, 0) as stage:
        client = stage.client()
        assert client.answers()[0][0] == 503
        assert "no decode worker" in client.error()
    async with pair_stage(0, 1) as stage:
        assert "no prefill worker" in stage.client().error()


@in_loop
async def test_both_legs_are_of_one_model() -> None:
    async with pair_stage(0, 0) as stage:
        stage.join("prefill", model="a")
        for model in "ba":
            stage.join("decode", model=model)
        stage.client({"prompt": "x"}, "/v1/completions")
        prefill, decode = stage.legs()
        assert [len(transport.calls) for transport in stage.transports] == [1, 0, 1]
        prefill.answer()
        decode.answer()


@in_loop
async def test_what_generates_nothing_needs_one_worker() -> None:
    async with pair_stage(1, 1) as stage:
        client = stage.client({"prompt": "a"}, "/tokenize")
        (call,) = stage.calls("prefill")
        assert call.fields == {"prompt": "a"}
        call.answer(200, b"[1]")
        assert client.answers() == [(200, b"[1]")]
        stage.join("mixed")
        stage.client({"prompt": "a"}, "/tokenize")
        (mixed,) = stage.calls("mixed")
        mixed.answer()


@in_loop
async def test_a_model_in_both_ways_goes_where_there_is_less_to_do() -> None:
    async with pair_stage(1, 1) as stage:
        stage.join("mixed")
        seen = []
        for _ in range(6):
            stage.client({"model": "m", "prompt": "a", "max_tokens": 10}, "/v1/completions")
            seen.append((len(stage.calls("mixed")), len(stage.calls("decode"))))
        assert seen == [(0, 1), (1, 1), (1, 2), (2, 2), (2, 3), (3, 3)]
        for role in ("mixed", "prefill", "decode"):
            for call in stage.calls(role):  # type: ignore[arg-type]
                call.answer()


@in_loop
async def test_mixed_workers_stand_in_for_pairs_and_pairs_for_them() -> None:
    async with pair_stage(1, 1) as stage:
        mixed = stage.join("mixed")
        stage.fleet.became_unhealthy(stage.workers[1], "gone")
        for _ in range(2):
            stage.client()
        assert len(stage.calls("mixed")) == 2
        for call in stage.calls("mixed"):
            call.answer()
        stage.fleet.became_unhealthy(mixed, "gone")
        assert "1 unhealthy" in stage.client().error()


@in_loop
async def test_workers_that_join_later_are_paired() -> None:
    async with pair_stage(0, 0) as stage:
        stage.join("mixed", model="other")
        assert "no model 'm'" in stage.client().error()
        stage.join("prefill")
        stage.join("decode")
        told(stage, prompt="a")


@in_loop
async def test_servers_that_do_not_meet_in_rooms_are_not_paired() -> None:
    async with pair_stage(0, 1) as stage:
        stage.join("prefill", kind="vllm")
        assert "1 vllm, which cannot be paired" in stage.client().error()
