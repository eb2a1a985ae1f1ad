"""A headless Chromium driven over its debugging pipe: the dashboard is tested in a real browser."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


def find_chromium() -> str | None:
    """Path of a Chromium or Chrome; None when there is none."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One page of a headless Chromium. Use it as a context manager.

    errors: uncaught exceptions of the page so far, as text."""

    def __init__(self, program: str, profile: Path) -> None:
        commands, self._commands = _pipe()
        self._answers, answers = _pipe()
        as_3_and_4 = (
            f"import os, sys; os.dup2({commands}, 3); os.dup2({answers}, 4); os.execv(sys.argv[1], sys.argv[1:])"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", as_3_and_4, program, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(commands, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self.errors: list[str] = []
        self._unread = b""
        self._last_id = 0
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")
        self.call("Runtime.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._commands)
        os.close(self._answers)

    def open(self, url: str) -> None:
        """Go to an address and wait until it is loaded."""
        self.call("Page.navigate", url=url)
        self.wait(f"location.href.startsWith('{url}') && document.readyState === 'complete'")

    def run(self, expression: str) -> Any:
        """Value of a JavaScript expression in the page; raises RuntimeError when it throws."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def wait(self, expression: str, timeout_s: float = 20.0) -> Any:
        """The value of an expression once it is truthy; raises TimeoutError with the page's text otherwise."""
        deadline = time.monotonic() + timeout_s
        while not (value := self.run(expression)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{expression}: {value!r} in\n{self.run('document.body.innerText')}")
            time.sleep(0.1)
        return value

    def screenshot(self, path: Path, width: int = 1240, height: int = 820, *, dark: bool = False) -> None:
        """Write a PNG of the page at this size."""
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        time.sleep(0.5)
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send one command of the DevTools protocol and wait for its answer."""
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("method") == "Runtime.exceptionThrown":
                self.errors.append(str(answer["params"]["exceptionDetails"]))
            if answer.get("id") == self._last_id:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result

    def _read(self, timeout_s: float = 60.0) -> dict[str, Any]:
        while b"\0" not in self._unread:
            if not select.select([self._answers], [], [], timeout_s)[0]:
                raise TimeoutError(f"Chromium said nothing for {timeout_s} s")
            part = os.read(self._answers, 1 << 20)
            if not part:
                raise RuntimeError(f"Chromium ended with {self._process.wait()}")
            self._unread += part
        message, self._unread = self._unread.split(b"\0", 1)
        answer: dict[str, Any] = json.loads(message)
        return answer


def _pipe() -> tuple[int, int]:
    """Both ends of a pipe, numbered from 10 on: 3 and 4 are Chromium's."""
    ends = os.pipe()
    moved = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return moved[0], moved[1]
