"""The workers' file: what it may say, and what its changes do to a fleet."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from tests.gateway.pure_fleet import ask, empty_fleet, router_of

from equipoise.config.worker import WorkerSpec
from equipoise.errors import ConfigError
from equipoise.gateway.fleet.worker import Found
from equipoise.gateway.fleet.workers_file import WorkersFile, read_workers

if TYPE_CHECKING:
    from pathlib import Path

    from equipoise.gateway.fleet.fleet import Fleet

SPECS = (
    WorkerSpec("http://a:1"),
    WorkerSpec("http://b:2", "prefill", "sglang", 8998, ("m", "n")),
)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "w.toml",
            '[[workers]]\nurl = "a:1"\n[[workers]]\nurl = "http://b:2"\nrole = "prefill"\nkind = "sglang"\n'
            'bootstrap_port = 8998\nmodels = ["m", "n"]\n',
        ),
        (
            "w.yaml",
            "workers:\n- a:1\n- {url: 'http://b:2', role: prefill, kind: sglang, bootstrap_port: 8998, "
            "models: [m, n]}\n",
        ),
        (
            "w.json",
            '{"workers": ["a:1", {"url": "b:2", "role": "prefill", "kind": "sglang", "bootstrap_port": 8998, '
            '"models": ["m", "n"]}]}',
        ),
    ],
)
def test_reads_toml_yaml_and_json(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert read_workers(tmp_path / name) == SPECS


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("workers = 3", "'workers' must be a list"),
        ("worker = []", "'worker' is not known; workers are listed under 'workers'"),
        ("[[workers]]\nrole = 'mixed'", "worker 1: a URL is expected, or keys and values with a 'url'"),
        ("workers = [3]", "worker 1: a URL is expected"),
        ("[[workers]]\nurl = 'a:1'\nrole = 'boss'", "worker 1: role: 'boss' must be one of mixed, prefill, decode"),
        ("[[workers]]\nurl = 'a:1'\nkind = ['vllm']", r"worker 1: kind: \['vllm'\] must be one of auto, equipoise, "),
        ("[[workers]]\nurl = 'a:1'\n[[workers]]\nurl = 'a:1/'", "http://a:1 is listed twice"),
        ("[[workers]]\nurl = 'a:1'\ncolour = 'red'", "worker 1: 'colour' is not known, only bootstrap_port, kind"),
        ("[[workers]]\nurl = 'https://a'", "worker 1: .*only http:// is spoken"),
        ("[[workers]]\nurl = 7", "worker 1: .*url"),
        ("[[workers", "is not valid TOML"),
    ],
)
def test_a_wrong_file_is_refused_with_the_entry(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "w.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        read_workers(path)


def write(path: Path, *entries: str) -> None:
    """Write a workers' file and make sure that it looks changed, however coarse the file system's clock is."""
    stamp = path.stat().st_mtime_ns if path.exists() else 0
    path.write_text("".join(f"[[workers]]\n{entry}\n" for entry in entries))
    os.utime(path, ns=(stamp + 1_000_000_000, stamp + 1_000_000_000))


def follow(file: WorkersFile, fleet: Fleet, now: float = 0.0) -> bool:
    """What the watch does every second. True when the file was taken over."""
    if not file.has_changed() or (specs := file.read()) is None:
        return False
    file.take_over(fleet, specs, now)
    return True


def states(fleet: Fleet) -> dict[str, str]:
    return {worker.host: worker.state for worker in fleet.workers}


def test_workers_come_and_go_with_the_file(tmp_path: Path) -> None:
    fleet, path = empty_fleet(), tmp_path / "w.toml"
    router, file = router_of(fleet), WorkersFile(path)
    write(path, "url = 'a:1'", "url = 'b:1'")
    assert follow(file, fleet)
    assert not follow(file, fleet), "it has not changed since"
    for worker in fleet.workers:
        fleet.found(worker, Found("openai", ("m",)), 0.0)
    routes = [router.route(ask(), "m", "mixed", (), 0.0) for _ in range(2)]
    write(path, "url = 'b:1'\nrole = 'decode'", "url = 'c:1'")
    assert follow(file, fleet)
    assert states(fleet) == {"a": "draining", "b": "starting", "c": "starting"}
    assert fleet.get("http://b:1").role == "decode"
    for route in routes:
        router.finished(route, "ok", 1.0)
    assert states(fleet) == {"b": "starting", "c": "starting"}
    write(path, "url = 'b:1'\nrole = 'decode'", "url = 'a:1'")
    assert follow(file, fleet)
    assert states(fleet) == {"b": "starting", "a": "starting"}


@pytest.mark.parametrize("text", ["workers: " + "[" * 50_000, "- " * 50_000, "workers: " + "{a: " * 50_000])
def test_a_file_without_a_bottom_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "w.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="is not valid YAML"):
        read_workers(path)


@pytest.mark.parametrize("what", ["pipe", "folder"])
def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path: Path, what: str) -> None:
    path = tmp_path / "w.yaml"
    os.mkfifo(path) if what == "pipe" else path.mkdir()
    with pytest.raises(ConfigError, match="it is no file"):
        read_workers(path)


@pytest.mark.parametrize("how", ["broken", "gone"])
def test_a_bad_file_changes_nothing_and_is_complained_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    fleet, path = empty_fleet(), tmp_path / "w.toml"
    file = WorkersFile(path)
    write(path, "url = 'a:1'")
    follow(file, fleet)
    if how == "gone":
        path.unlink()
    else:
        write(path, "url = ")
    for _ in range(3):
        assert not follow(file, fleet)
    assert states(fleet) == {"a": "starting"}
    assert file.error is not None
    assert [record.levelname for record in caplog.records].count("ERROR") == 1
    write(path, "url = 'b:1'")
    assert follow(file, fleet)
    assert file.error is None
    assert states(fleet) == {"b": "starting"}


def test_workers_from_elsewhere_are_left_alone(tmp_path: Path) -> None:
    fleet, path = empty_fleet(), tmp_path / "w.toml"
    fleet.add(WorkerSpec("a:1"), 0.0)
    file = WorkersFile(path)
    write(path, "url = 'a:1'\nrole = 'decode'", "url = 'b:1'")
    follow(file, fleet)
    assert fleet.get("http://a:1").role == "mixed"
    write(path, "url = 'c:1'")
    follow(file, fleet)
    assert states(fleet) == {"a": "starting", "c": "starting"}


def test_what_was_removed_by_hand_stays_removed_until_its_entry_changes(tmp_path: Path) -> None:
    fleet, path = empty_fleet(), tmp_path / "w.toml"
    file = WorkersFile(path)
    write(path, "url = 'a:1'", "url = 'b:1'")
    follow(file, fleet)
    fleet.remove(fleet.get("http://a:1"))
    write(path, "url = 'a:1'", "url = 'b:1'", "url = 'c:1'")
    follow(file, fleet)
    assert states(fleet) == {"b": "starting", "c": "starting"}
    write(path, "url = 'a:1'\nkind = 'vllm'", "url = 'b:1'", "url = 'c:1'")
    follow(file, fleet)
    assert states(fleet) == {"b": "starting", "c": "starting", "a": "starting"}
