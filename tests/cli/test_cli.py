"""The command line as its user meets it: a process, its exit code, its two streams."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from typing import TYPE_CHECKING

import pytest
from tests.server.raw import load
from tests.serving import serve

from equipoise import __version__
from equipoise.cli.settings import SECTIONS, check_environment, flag_name, keys_of
from equipoise.demo import demo_model_path
from equipoise.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def run(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """`equipoise WORDS`."""
    return subprocess.run(
        [sys.executable, "-m", "equipoise", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **env},
    )


def test_version() -> None:
    for words in (["version"], ["--version"]):
        done = run(*words)
        assert (done.returncode, done.stdout, done.stderr) == (0, f"{__version__}\n", "")


@pytest.mark.parametrize("command", SECTIONS)
def test_help_names_every_setting(command: str) -> None:
    done = run(command, "--help", COLUMNS="200")
    assert done.returncode == 0
    for key in keys_of(command).types:
        assert f"--{key}" in done.stdout


def test_help_has_the_words_of_the_settings() -> None:
    done = run("serve", "--help", COLUMNS="200")
    for choices in ("fcfs, priority, shortest-first, longest-first", "auto, hermes, llama3, mistral, pythonic, none"):
        assert f"[{choices}]" in done.stdout
    assert "[debug, info, warning, error]" in done.stdout
    assert "Seconds that running requests are given" in done.stdout  # the dataclass's own words


def test_help_needs_no_heavy_imports() -> None:
    code = (
        "import sys, equipoise.cli as cli\n"
        "try: cli.main(['serve', '--help'])\n"
        "finally: print(sorted({'torch', 'numpy', 'zmq', 'uvicorn', 'starlette'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("serve", "--page-size", "3"), "page-size: 3 is not a power of two"),
        (("serve", "--max-running", "many"), "--max-running"),
        (("serve", "--max-running", "3.5"), "--max-running: 3.5 is not a whole number"),
        (("serve", "--port=80.0"), "--port: 80.0 is not a whole number"),
        (("serve", "--depth", "1e2"), "--depth: 1e2 is not a whole number"),
        (("serve", "--max-runing", "3"), "Did you mean --max-running?"),
        (("serve", "--port", "70000"), "port: 70000"),
        (("serve", "--executor", "magic"), "--executor"),
        (("serve", "--shutdown-timeout", "-1"), "shutdown-timeout: -1.0"),
        (("serve", "--log-level", "loud"), '"loud" for --log-level. Choose from: "debug", "info", "warning", "error".'),
        (
            ("serve", "--tool-parser", "yaml"),
            '"yaml" for --tool-parser. Choose from: "auto", "hermes", "llama3", "mistral",',
        ),
        (("serve", "--max-body-mb", "0"), "max-body-mb: 0.0"),
        (("serve", "--max-body-mb", "inf"), "max-body-mb: inf"),
        (("serve", "--api-key", ""), "api-key: it must be ASCII and not empty"),
        (("serve", "--kv-memory-gb", "inf"), "kv-memory-gb: inf"),
        (("serve", "--num-pages", "1000000000000"), "num-pages: 1000000000000 must be at most"),
        (("serve", "--max-step-tokens", "1180591620717411303424"), "max-step-tokens: 1180591620717411303424"),
        (("serve", "--num-threads", "100000"), "num-threads: 100000 must be at most"),
        (("serve", "--step-ms", "inf"), "step-ms: inf"),
        (("serve", "--cost-model", "roofline"), "cost by roofline needs config"),
        (("serve", "--sim-seed", "1180591620717411303424"), "sim-seed: 1180591620717411303424"),
        (("serve", "--sim-vocab-size", "0"), "sim-vocab-size: 0"),
        (
            ("serve", "--order", "random"),
            '"random" for --order. Choose from: "fcfs", "priority", "shortest-first", "longest-first".',
        ),
        (("serve", "--port", "0", "--rules", "nowhere:rule"), "rule: 'nowhere:rule' cannot be loaded"),
        (("serve", "--port", "0", "a-model"), "/a-model is not a folder"),
        (("serve", "a-model", "--model", "b-model"), "model: given twice, as 'a-model' and as --model b-model"),
        (("serve", "--model=b-model", "a-model"), "model: given twice, as 'a-model' and as --model b-model"),
        (("serve", "--executor", "sim", "--prefix-cache", "false"), "switches take no value"),
        (("serve", "--config", "/nowhere.toml"), "/nowhere.toml"),
        (("dance",), "dance"),
    ],
)
def test_wrong_words_end_with_2_and_one_line(words: tuple[str, ...], message: str) -> None:
    done = run(*words)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.startswith("equipoise: ")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_runing = 3", "max_runing is not a setting, did you mean max-running?"),
        ("[scheduler]\nmax_running = 3", "scheduler is not a setting"),
        ("max_running = ", "not valid TOML"),
        ("max_running = 0", "max-running: 0 must be at least 1"),
        ('max_running = "x"', "max-running"),
        ("prefix_cache = 7", "prefix-cache: Expected bool, got int"),
        ("port = 1.5", "port: Expected int, got float"),
        ("cors-origins = [1]", "cors-origins: Expected str, got int"),
        ('executor = "magic"', "executor: Invalid enum value 'magic', it must be one of torch, sim"),
        ("[cost]\nkv_token_ms = 1", "cost.kv_token_ms is not a setting, did you mean kv_token_us?"),
        ("step-ms = 1\n[cost]\nstep_ms = 1", "step-ms: given twice, as cost.step_ms too"),
        ('[cost]\ngpu = "abacus"', "cost-gpu: Invalid enum value 'abacus', it must be one of H100"),
        ('[cost]\nmodel = "table"', "cost by table needs tables and num-layers"),
        ('order = "random"', "it must be one of fcfs, priority, shortest-first, longest-first"),
    ],
)
def test_a_wrong_file_ends_with_2_and_one_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text(text)
    done = run("serve", "--config", str(file))
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_wrong_variable_ends_with_2_and_one_line() -> None:
    done = run("serve", EQUIPOISE_MAX_RUNING="3")
    assert done.returncode == 2
    assert done.stderr == (
        "equipoise: environment: EQUIPOISE_MAX_RUNING is not a setting, did you mean EQUIPOISE_MAX_RUNNING?\n"
    )
    assert "max-running: 0" in run("serve", EQUIPOISE_MAX_RUNNING="0").stderr
    assert "EQUIPOISE_PORT: 8.5 is not a whole number" in run("serve", EQUIPOISE_PORT="8.5").stderr


def test_flags_win_over_environment_over_file(tmp_path: Path, tiny_tokenizer: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(
        "max-running = 11\nsim_num_pages = 111\npage-size = 8\nshutdown_timeout_s = 3\nprefix_cache = false\n"
        f'executor = "sim"\ntokenizer = "{tiny_tokenizer}"\ncors-origins = ["https://a.example"]\n'
    )
    env = {"EQUIPOISE_SIM_NUM_PAGES": "222", "EQUIPOISE_PAGE_SIZE": "32", "EQUIPOISE_CONFIG": str(file)}
    with serve("--page-size", "64", "--step-ms", "1", env=env) as server:
        found = load(server)
        assert found["max_running_requests"] == 11  # the file's
        assert found["max_total_num_tokens"] == 222 * 64  # the environment's and the flag's


def test_the_cost_of_a_scenario_in_a_file(tmp_path: Path, tiny_tokenizer: Path) -> None:
    (tmp_path / "model.json").write_text((demo_model_path() / "config.json").read_text())
    section = {"model": "roofline", "config": "model.json", "gpu": "A100", "tables": None, "num_layers": None}
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({"executor": "sim", "tokenizer": str(tiny_tokenizer), "cost": section}))
    with serve("--config", str(file), "--cost-tp-size", "2", "--lockstep", "sim-model") as server:
        with urllib.request.urlopen(f"{server.url}/server_info") as answer:
            found = json.load(answer)["engine"]["cost"]
        assert (found["model"], found["config"], found["gpu"]) == ("roofline", str(tmp_path / "model.json"), "A100")
        assert found["tp_size"] == 2
        assert load(server)["dp_rank"] == 0  # one rank is a group by itself


def test_a_word_is_the_model(tiny_tokenizer: Path) -> None:
    flags = ("--executor", "sim", "--tokenizer", str(tiny_tokenizer))
    with serve("some/word-model", *flags) as server:
        assert server.name == "word-model"
    env = {"EQUIPOISE_MODEL": "some/other-model"}
    with serve("--cors-origins", "https://a.example", "some/word-model", *flags, env=env) as server:
        assert server.name == "word-model", "it wins over the environment, and over flags that may come again"
        with urllib.request.urlopen(f"{server.url}/server_info") as answer:
            assert '"some/word-model"' in answer.read().decode()


def test_seconds_are_left_out_of_flags() -> None:
    assert flag_name("shutdown_timeout_s") == "shutdown-timeout"
    assert flag_name("max_running") == "max-running"


def test_environment_of_others_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EQUIPOISER", "1")
    check_environment()
    monkeypatch.setenv("EQUIPOISE_", "1")
    with pytest.raises(ConfigError):
        check_environment()
