"""The Python API against a real rank with the sim executor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
from tests.tiny_tokenizer import write_folder

import equipoise
from equipoise import LLM, SamplingParams
from equipoise.errors import CheckpointError, ConfigError, InvalidValueError, UnavailableError
from equipoise.llm import engine_config

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}bot:"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model"), chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), executor="sim", step_ms=1.0, max_running=32) as llm:
        yield llm


def test_prompts_of_every_shape(llm: LLM) -> None:
    params = SamplingParams(max_tokens=5)
    (one,) = llm.generate("hello world", params)
    assert one.prompt == "hello world"
    assert llm.engine.tokenizer.decode(one.prompt_token_ids) == "hello world"
    (answer,) = one.outputs
    assert (answer.index, len(answer.token_ids), answer.finish_reason) == (0, 5, "length")
    assert answer.text == llm.engine.tokenizer.decode(answer.token_ids)
    by_ids = llm.generate([one.prompt_token_ids, [7, 8]], params)
    assert [len(output.outputs[0].token_ids) for output in by_ids] == [5, 5]
    assert by_ids[0].outputs[0].token_ids == answer.token_ids
    assert by_ids[0].prompt is None
    assert llm.generate(one.prompt_token_ids, params)[0].outputs[0].token_ids == answer.token_ids
    assert llm.generate([], params) == []


def test_params_for_each_and_choices(llm: LLM) -> None:
    first, second = llm.generate(
        ["hello", "world"], [SamplingParams(max_tokens=2), SamplingParams(max_tokens=9, n=3, seed=4, logprobs=1)]
    )
    assert [len(choice.token_ids) for choice in first.outputs] == [2]
    assert [choice.index for choice in second.outputs] == [0, 1, 2]
    assert len({tuple(choice.token_ids) for choice in second.outputs}) == 3
    assert [each.token_id for each in second.outputs[2].logprobs or []] == second.outputs[2].token_ids
    (alone,) = llm.generate(["world"], SamplingParams(max_tokens=9, seed=6))
    assert alone.outputs[0].token_ids == second.outputs[2].token_ids
    with pytest.raises(InvalidValueError, match="1 for 2 prompts"):
        llm.generate(["a", "b"], [SamplingParams()])


def test_many_more_prompts_than_seats(llm: LLM) -> None:
    outputs = llm.generate([[i % 300] for i in range(1000)], SamplingParams(max_tokens=3))
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3] * 1000


def test_chat(llm: LLM) -> None:
    (output,) = llm.chat([{"role": "user", "content": "hello"}], SamplingParams(max_tokens=2))
    assert output.prompt == "<s>user: hello\nbot:"
    assert output.prompt_token_ids.count(0) == 1
    conversation = [{"role": "user", "content": "hello"}]
    assert len(llm.chat([conversation, conversation], SamplingParams(max_tokens=2))) == 2


@pytest.mark.parametrize(
    "prompt", [[[]], [[1], [10**6]], [[2**40]], [["x"]], [[1.5, "a"]], [3.5], 5, None, b"a", {"a": 1}, "\ud800"]
)
def test_bad_prompts(llm: LLM, prompt: Any) -> None:
    with pytest.raises(InvalidValueError, match="prompt"):
        llm.generate(prompt, SamplingParams(max_tokens=2))
    assert llm.generate([[1]], SamplingParams(max_tokens=2))[0].outputs[0].finish_reason == "length"


def test_arrays_are_prompts_too(llm: LLM) -> None:
    wanted = llm.generate([1, 2], SamplingParams(max_tokens=2))
    assert llm.generate(np.array([1, 2]), SamplingParams(max_tokens=2)) == wanted  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 2.5),
        ("max_tokens", 2**70),
        ("temperature", "hot"),
        ("stop", "."),
        ("stop", ("\ud800",)),
        ("seed", np.int64(3)),
        ("ignore_eos", "yes"),
        ("logit_bias", {"1": 1.0}),
        ("grammar", "[0-9]+"),
        ("min_tokens", 2**62),
    ],
)
def test_params_of_a_wrong_type_harm_nobody(llm: LLM, field: str, value: Any) -> None:
    params = SamplingParams(**{"max_tokens": None, field: value})
    with pytest.raises(InvalidValueError, match=f"^{field}: ") as caught:
        llm.generate([1], params)
    assert caught.value.field == field
    assert llm.generate([[1]], SamplingParams(max_tokens=2))[0].outputs[0].finish_reason == "length"
    with pytest.raises(InvalidValueError, match="params"):
        llm.generate([1], {"max_tokens": 2})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "messages",
    [
        5,
        "hi",
        [5],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [5]}],
        [{"role": "user", "content": [{"type": "text", "text": 5}]}],
        [{"role": "user", "content": "x", "tool_calls": 5}],
    ],
)
def test_bad_messages(llm: LLM, messages: Any) -> None:
    with pytest.raises(InvalidValueError, match="messages"):
        llm.chat(messages, SamplingParams(max_tokens=2))


def test_settings_by_name() -> None:
    config = engine_config("m", executor="sim", page_size=4, max_running=3, step_ms=2.0)
    assert (config.model.executor, config.cache.page_size, config.scheduler.max_running) == ("sim", 4, 3)
    with pytest.raises(ConfigError, match=r"max_runing: no such setting; allowed are .*max_running"):
        engine_config("m", max_runing=3)
    with pytest.raises(ConfigError, match="max_running: Expected `int`, got `str`"):
        engine_config("m", max_running="3")
    with pytest.raises(ConfigError, match="page-size: 3"):
        engine_config("m", page_size=3)


def test_failed_start_leaves_nothing(tmp_path: Path, model: Path) -> None:
    with pytest.raises(CheckpointError):
        LLM(str(tmp_path), executor="sim")
    with pytest.raises(ConfigError, match="max-step-tokens"):
        LLM(str(model), executor="sim", chunked_prefill=False, max_step_tokens=1)


def test_several_ranks_share_the_prompts(model: Path) -> None:
    params = SamplingParams(max_tokens=8, n=2, seed=3)
    prompts = ["hello", "world", "hello world", "bye"]
    with LLM(str(model), executor="sim", step_ms=1.0) as one:
        expected = [[choice.token_ids for choice in output.outputs] for output in one.generate(prompts, params)]
    with LLM(str(model), executor="sim", step_ms=1.0, dp_size=2) as two:
        found = [[choice.token_ids for choice in output.outputs] for output in two.generate(prompts, params)]
        assert found == expected
        assert [rank.load.total_finished for rank in two.engine.ranks] == [4, 4]


def test_closed_and_dead(model: Path) -> None:
    llm = LLM(str(model), executor="sim")
    pid = llm.engine.ranks[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(UnavailableError, match="SIGKILL"):
        llm.generate("hello", SamplingParams(max_tokens=10**6))
    llm.close()
    llm.close()
    assert not psutil.pid_exists(pid)
    with pytest.raises(ConfigError, match="closed"):
        llm.generate("hello")


SCRIPT = """
import sys
import equipoise
assert "numpy" not in sys.modules and "torch" not in sys.modules
from equipoise import LLM, SamplingParams
llm = LLM(sys.argv[1], executor="sim", step_ms=1.0)  # no __main__ guard, never closed
print(llm.engine.ranks[0].pid, llm.generate("hello", SamplingParams(max_tokens=2))[0].outputs[0].finish_reason)
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""


def test_plain_script(model: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script), str(model)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    pid, reason = done.stdout.split()
    assert reason == "length"
    assert not psutil.pid_exists(int(pid))


def test_public_names() -> None:
    assert {name: getattr(equipoise, name).__name__ for name in ("LLM", "AsyncEngine", "SamplingParams")}
    with pytest.raises(AttributeError, match="Nothing"):
        equipoise.Nothing  # noqa: B018
