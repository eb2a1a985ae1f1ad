"""The scenario runner: what it replays, what it reports, and how it ends."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from equipoise.testing import scenarios
from equipoise.testing.scenarios import Case, run_case

TWO_REQUESTS = {
    "name": "two_requests",
    "why": "a short request runs beside a long one",
    "cfg": {"budget": 10, "usable_blocks": 20, "block_size": 4},
    "ops": [
        ["add", "a", {"n": 14, "max_tokens": 2}],
        ["add", "b", {"n": 3, "max_tokens": 1}],
        ["step"],
        ["step", {}],
        ["sched"],
        ["upd"],
    ],
    "expected": [
        {"op": "sched", "scheduled": {"a": 10}, "preempted": [], "waiting": ["b"], "free": 17},
        {"op": "upd", "delivered": {}, "finished": {}, "waiting": ["b"], "free": 17},
        {"op": "sched", "scheduled": {"a": 4, "b": 3}, "waiting": [], "free": 15},
        {"op": "upd", "delivered": {"a": 1, "b": 1}, "finished": {"b": "length"}, "free": 16},
        {"op": "sched", "scheduled": {"a": 1}, "free": 16},
        {"op": "upd", "delivered": {"a": 1}, "finished": {"a": "length"}, "free": 20},
    ],
}


def changed(name, **changes):
    """TWO_REQUESTS under another name, with other parts."""
    return {**TWO_REQUESTS, "name": name, **changes}


def report_of(case):
    return run_case(msgspec.convert(case, Case))


def rows(*expected, **case):
    """A case of which only the expected rows and what is given matter."""
    return {"name": "case", "cfg": {}, "ops": [], "expected": list(expected), **case}


def run_main(tmp_path, cases, *options):
    path = tmp_path / "cases.json"
    path.write_bytes(cases if isinstance(cases, bytes) else msgspec.json.encode(cases))
    return scenarios.main([str(path), *options])


# ---------------------------------------------------------------- what a case can say


def test_a_case_that_agrees_has_no_notes():
    report = report_of(TWO_REQUESTS)
    assert (report.status, report.notes) == ("agree", [])


@pytest.mark.parametrize(
    ("row", "field", "wrong"),
    [
        (0, "scheduled", {"a": 9}),
        (0, "free", 16),
        (0, "waiting", []),
        (0, "preempted", ["b"]),
        (3, "delivered", {"a": 1}),
        (3, "finished", {"b": "stop"}),
        (3, "finished", {}),
    ],
)
def test_every_difference_names_its_row_and_field(row, field, wrong):
    expected = [dict(fields) for fields in TWO_REQUESTS["expected"]]
    ours = expected[row][field]
    expected[row][field] = wrong
    report = report_of(changed("wrong", expected=expected))
    assert report.status == "differ"
    (note,) = report.notes
    assert note == f"row {row} ({expected[row]['op']}): {field} is {ours}, expected {wrong}"


def test_a_missing_row_is_a_difference():
    report = report_of(changed("short", expected=TWO_REQUESTS["expected"][:-1]))
    assert report.notes == ["6 rows, expected 5"]


def test_what_is_not_expected_is_not_compared():
    expected = [{"op": fields["op"]} for fields in TWO_REQUESTS["expected"]]
    assert report_of(changed("bare", expected=expected)).status == "agree"


def test_the_order_of_waiting_requests_is_not_compared():
    case = rows(
        {"op": "sched", "scheduled": {"a": 2}, "waiting": ["c", "b"]},
        cfg={"max_num_seqs": 1},
        ops=[["add", name, {"n": 2}] for name in "abc"] + [["sched"]],
    )
    assert report_of(case).status == "agree"


def test_a_plan_stays_in_flight_until_it_is_fed():
    case = rows(
        {"op": "sched", "scheduled": {"a": 4}},
        {"op": "sched", "scheduled": {"a": 1}},
        {"op": "upd", "delivered": {"a": 1}},
        {"op": "sched", "scheduled": {}},
        {"op": "upd", "delivered": {"a": 1}, "finished": {"a": "length"}},
        {"op": "upd", "delivered": {}},
        cfg={"async_sched": True},
        ops=[["add", "a", {"n": 4, "max_tokens": 2}], ["sched"], ["sched"], ["upd"], ["sched"], ["upd"], ["upd"]],
    )
    assert report_of(case).notes == []


def test_run_and_pipe_repeat():
    case = rows(*[{"op": "sched"}, {"op": "upd"}] * 3, ops=[["add", "a", {"n": 4}], ["run", 3]])
    assert report_of(case).status == "agree"
    case = rows(
        {"op": "sched", "scheduled": {"a": 4}},
        {"op": "sched", "scheduled": {"a": 1}},
        {"op": "upd", "delivered": {"a": 1}},
        {"op": "sched", "scheduled": {"a": 1}},
        {"op": "upd", "delivered": {"a": 1}},
        cfg={"async_sched": True},
        ops=[["add", "a", {"n": 4}], ["pipe", 3]],
    )
    assert report_of(case).notes == []


def test_forced_tokens_stop_a_request():
    case = rows(
        {"op": "sched"},
        {"op": "upd", "finished": {"a": "stop"}, "delivered": {"a": 1}},
        ops=[["add", "a", {"n": 4, "stop": [7]}], ["sched"], ["upd", {"tok": {"a": [7]}}]],
    )
    assert report_of(case).notes == []


def test_drafts_for_a_prompt_that_is_partly_computed_are_void():
    case = rows(
        {"op": "sched", "scheduled": {"a": 3}},
        {"op": "upd"},
        {"op": "sched", "scheduled": {"a": 1}},
        {"op": "upd"},
        {"op": "sched", "scheduled": {"a": 1}},
        {"op": "upd"},
        cfg={"spec": 2, "budget": 3},
        ops=[["add", "a", {"n": 4}], ["step"], ["drafts", {"a": [7, 8]}], ["step"], ["step"]],
    )
    assert report_of(case).notes == []


def test_no_more_drafts_are_accepted_than_there_were():
    case = rows(
        {"op": "sched", "scheduled": {"a": 4}},
        {"op": "upd", "delivered": {"a": 1}},
        {"op": "sched", "scheduled": {"a": 3}},
        {"op": "upd", "delivered": {"a": 3}},
        {"op": "sched", "scheduled": {"a": 1}},
        {"op": "upd", "delivered": {"a": 1}},
        cfg={"spec": 2},
        ops=[
            ["add", "a", {"n": 4}],
            ["step"],
            ["drafts", {"a": [7, 8]}],
            ["step", {"accept": {"a": 9}}],
            ["step", {"accept": {"a": 1}}],
        ],
    )
    assert report_of(case).notes == []


def test_prompts_of_equal_ranges_share_pages():
    prompt = [[1, 8], [2, 4]]
    case = rows(
        {"op": "sched", "scheduled": {"a": 12}},
        {"op": "upd"},
        {"op": "sched", "scheduled": {"a": 1, "b": 4}, "computed": {"b": 8}},
        {"op": "upd"},
        cfg={"apc": True, "block_size": 4},
        ops=[["add", "a", {"prompt": prompt}], ["step"], ["add", "b", {"prompt": prompt}], ["step"]],
    )
    assert report_of(case).notes == []


def test_abort_pause_and_reset_are_operations():
    case = rows(
        {"op": "sched", "scheduled": {}, "waiting": ["a"]},
        {"op": "upd", "delivered": {}},
        {"op": "sched", "scheduled": {"a": 4}},
        {"op": "upd"},
        {"op": "sched", "scheduled": {}},
        {"op": "upd", "delivered": {}},
        {"op": "abort", "free": 9999, "waiting": []},
        ops=[
            ["pause", "PAUSED_NEW"],
            ["add", "a", {"n": 4}],
            ["step"],
            ["pause", "UNPAUSED"],
            ["step"],
            ["pause", "PAUSED_ALL"],
            ["step"],
            ["abort", "a"],
            ["reset", False],
        ],
    )
    assert report_of(case).notes == []


# ---------------------------------------------------------------- what cannot be replayed


def test_an_unknown_operation_is_unsupported_by_name():
    report = report_of(changed("other", ops=[["teleport", "a"]]))
    assert (report.status, report.notes) == ("unsupported", ["op teleport"])


def test_an_unknown_setting_is_an_error_that_names_it(tmp_path, capsys):
    assert run_main(tmp_path, [changed("x", cfg={"speed": 3})]) == 2
    assert "speed" in capsys.readouterr().err


# ---------------------------------------------------------------- the command


def test_all_agreeing_is_exit_status_0(tmp_path, capsys):
    assert run_main(tmp_path, [TWO_REQUESTS, changed("unknown", ops=[["teleport"]])]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["agree", "two_requests"]
    assert lines[-1] == "1 agree, 0 differ, 1 unsupported"


def test_a_difference_is_exit_status_1_and_is_listed(tmp_path, capsys):
    wrong = changed("wrong", expected=[{"op": "sched", "scheduled": {"a": 1}}, *TWO_REQUESTS["expected"][1:]])
    assert run_main(tmp_path, [wrong, TWO_REQUESTS]) == 1
    out = capsys.readouterr().out
    assert "row 0 (sched): scheduled is {'a': 10}, expected {'a': 1}" in out
    assert out.splitlines()[-1] == "1 agree, 1 differ, 0 unsupported"


def test_json_reports_every_case(tmp_path, capsys):
    assert run_main(tmp_path, [TWO_REQUESTS, changed("odd", ops=[["teleport"]])], "--json") == 0
    reports = msgspec.json.decode(capsys.readouterr().out)
    assert [(r["name"], r["status"], r["notes"]) for r in reports] == [
        ("two_requests", "agree", []),
        ("odd", "unsupported", ["op teleport"]),
    ]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"[", "truncated"),
        (b"{}", "array"),
        (b'[{"name": 3}]', "name"),
        (b'[{"name": "x", "cfg": {}, "ops": []}]', "expected"),
        (b'[{"name": "x", "cfg": {}, "ops": [[]], "expected": []}]', "$[0].ops[0]"),
        (b"\xff\xfe", ""),
    ],
)
def test_a_broken_file_is_exit_status_2_with_one_line(tmp_path, capsys, content, says):
    assert run_main(tmp_path, content) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("error: ")
    assert "cases.json" in line
    assert says in line


@pytest.mark.parametrize("path", ["nowhere.json", "."])
def test_a_file_that_cannot_be_read_is_exit_status_2(tmp_path, capsys, path):
    assert scenarios.main([str(tmp_path / path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")


@pytest.mark.parametrize(
    "ops",
    [
        [["add", "a", {}], ["step"]],
        [["add", "a", {"n": 0}]],
        [["abort", "nobody"]],
        [["upd"]],
        [["run"]],
        [["run", "x"]],
        [["add", "a", {"prompt": [[1]]}]],
        [["pause", "SOMETIMES"]],
    ],
)
def test_a_script_that_makes_no_sense_is_exit_status_2_with_one_line(tmp_path, capsys, ops):
    assert run_main(tmp_path, [changed("nonsense", ops=ops)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert "nonsense" in line


def test_settings_that_cannot_work_are_exit_status_2(tmp_path, capsys):
    assert run_main(tmp_path, [changed("tiny", cfg={"usable_blocks": 0})]) == 2
    assert "num-pages" in capsys.readouterr().err


def test_as_a_command(tmp_path):
    path = tmp_path / "cases.json"
    path.write_bytes(msgspec.json.encode([TWO_REQUESTS]))
    command = [sys.executable, "-m", "equipoise.testing.scenarios", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "1 agree, 0 differ, 0 unsupported"
