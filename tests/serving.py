"""Real servers for tests: `equipoise serve` in a process of its own, and a tiny tokenizer for the sim executor."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CHAT_TEMPLATE = """{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>
Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call>
{% endif %}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% if message.tool_calls %}
{% for call in message.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}{% endif %}
{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""

READY = re.compile(r"Equipoise serves (?P<name>\S+) on (?P<url>http://\S+) \(ready in [\d.]+ s\)")
STARTUP_S = 60.0
STOP_S = 20.0


def write_tiny_tokenizer(folder: Path, *, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """A byte-level tokenizer without merges: one token per byte, and <eos>. Every text goes there and back."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<eos>", "tokenizer_class": "PreTrainedTokenizerFast"}
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@dataclass
class Server:
    """A running server; its stderr goes into the file `log`."""

    process: subprocess.Popen[bytes]
    url: str
    name: str
    log: Path
    was_told_to_stop: bool = False

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def read_log(self) -> str:
        """Everything on stderr so far."""
        return self.log.read_text(errors="replace")

    def signal(self, number: int = signal.SIGTERM) -> None:
        """Send a signal to the server process."""
        self.was_told_to_stop = True
        self.process.send_signal(number)

    def wait(self, timeout_s: float = STOP_S) -> int:
        """The exit code."""
        return self.process.wait(timeout_s)


def command(*flags: str) -> list[str]:
    """`equipoise serve` on a free port."""
    return [sys.executable, "-m", "equipoise", "serve", "--port", "0", *flags]


@contextlib.contextmanager
def serve(*flags: str, exit_code: int | None = 0, env: dict[str, str] | None = None) -> Iterator[Server]:
    """`equipoise serve` with `flags`, ready to answer; told to stop at the end.

    `exit_code` is what it must end with, None for any; a traceback in its log is an error unless it is None."""
    with tempfile.NamedTemporaryFile(prefix="equipoise-", suffix=".log") as log:
        process = subprocess.Popen(
            command(*flags),
            stdin=subprocess.DEVNULL,
            stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        )
        try:
            server = _wait_ready(process, Path(log.name))
            yield server
            if process.poll() is None and not server.was_told_to_stop:
                server.signal()
            code = server.wait()
            text = server.read_log()
            if exit_code is not None:
                assert code == exit_code, f"exit code {code}, expected {exit_code}:\n{text}"
                assert "Traceback" not in text, text
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def _wait_ready(process: subprocess.Popen[bytes], log: Path) -> Server:
    deadline = time.monotonic() + STARTUP_S
    while time.monotonic() < deadline:
        is_over = process.poll() is not None
        match = READY.search(log.read_text(errors="replace"))
        if match:
            return Server(process, match["url"], match["name"], log)
        if is_over:
            break
        time.sleep(0.02)
    raise AssertionError(f"the server did not become ready, exit code {process.poll()}:\n{log.read_text()}")


def sim_flags(folder: Path, *more: str, step_ms: float = 1.0) -> Sequence[str]:
    """Flags of a simulated server with the tokenizer in `folder`."""
    return (
        *("--executor", "sim", "--tokenizer", str(folder), "--model", "sim-model"),
        *("--step-ms", str(step_ms), "--prefill-token-ms", "0", "--decode-row-ms", "0", *more),
    )
