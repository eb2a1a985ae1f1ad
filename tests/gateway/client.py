"""A client that tells exactly what came back and when, and that can carry thousands of streams."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

import httptools

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"


@dataclass
class Reply:
    """One answer. `is_whole` says that it ended as HTTP wants it; otherwise `trouble` says what happened."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    is_whole: bool = False
    trouble: str = ""
    began_at: float = 0.0
    head_at: float | None = None
    ended_at: float = 0.0

    def json(self) -> Any:
        """The body, decoded."""
        return json.loads(self.body)

    def events(self) -> list[Any]:
        """The server-sent events but [DONE], decoded."""
        lines = [line for line in self.body.split(b"\n") if line.startswith(b"data: ")]
        return [json.loads(line[6:]) for line in lines if line != b"data: [DONE]"]

    def is_done(self) -> bool:
        """Whether the stream said that it is over."""
        return self.is_whole and self.body.rstrip().endswith(b"data: [DONE]")

    def error(self) -> dict[str, Any]:
        """The error in an OpenAI-shaped answer, or in the last event of a stream. Raises where there is none."""
        last = self.body.rstrip().rpartition(b"data: ")[2] if self.body.startswith(b"data: ") else self.body
        return json.loads(last)["error"]  # type: ignore[no-any-return]


class Reading:
    """Callbacks of httptools that fill a Reply."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.parser = httptools.HttpResponseParser(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.reply.headers[name.decode().lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.reply.status = self.parser.get_status_code()
        self.reply.head_at = time.monotonic()

    def on_body(self, body: bytes) -> None:
        self.reply.body += body

    def on_message_complete(self) -> None:
        self.reply.is_whole = self.reply.status >= 200


def request_bytes(path: str, body: object, method: str = "POST", **headers: str) -> bytes:
    """A request as it goes over the wire; underscores in header names become hyphens."""
    payload = body if isinstance(body, bytes) else json.dumps(body).encode() if body is not None else b""
    lines = [f"{method} {path} HTTP/1.1", "Host: test", "Content-Type: application/json"]
    lines += [f"Content-Length: {len(payload)}"] if payload or method == "POST" else []
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + payload


class Session:
    """A client that keeps its connection from request to request while it can."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(
        self, path: str, body: object = None, *, method: str = "POST", timeout_s: float = 60.0, **headers: str
    ) -> Reply:
        """One request. A time-out, a reset and a cut are told in the reply, never raised."""
        reply = Reply(began_at=time.monotonic())
        try:
            async with asyncio.timeout(timeout_s):
                if self._streams is None:
                    self._streams = await asyncio.open_connection("127.0.0.1", self._port)
                reader, writer = self._streams
                writer.write(request_bytes(path, body, method, **headers))
                await read(reader, reply)
        except TimeoutError:
            reply.trouble = "timeout"
        except OSError as error:
            reply.trouble = f"connection: {error}"
        except httptools.HttpParserError as error:
            reply.trouble = f"not HTTP: {error}"
        finally:
            if not reply.is_whole or reply.headers.get("connection") == "close":
                self.close()
        reply.ended_at = time.monotonic()
        return reply

    def close(self) -> None:
        """Leave."""
        if self._streams is not None:
            self._streams[1].close()
        self._streams = None


async def ask(port: int, path: str, body: object = None, **more: Any) -> Reply:
    """`Session.ask` on a connection of its own."""
    session = Session(port)
    try:
        return await session.ask(path, body, **more)
    finally:
        session.close()


async def read(reader: asyncio.StreamReader, reply: Reply) -> None:
    """Read one answer into `reply`."""
    parser = Reading(reply).parser
    while not reply.is_whole:
        data = await reader.read(65536)
        if not data:
            reply.trouble = "cut" if reply.status else "no answer"
            return
        parser.feed_data(data)


def ask_now(port: int, path: str, body: object = None, **more: Any) -> Reply:
    """`ask` from code that is not asynchronous."""
    return asyncio.run(ask(port, path, body, **more))


async def gather(*asked: Any) -> list[Reply]:
    """All replies."""
    return list(await asyncio.gather(*asked))


def chat(content: str = "hello", **more: object) -> dict[str, object]:
    """A chat request."""
    return {"model": "test-model", "messages": [{"role": "user", "content": content}], **more}


def completion(prompt: str = "hello", **more: object) -> dict[str, object]:
    """A completion request."""
    return {"model": "test-model", "prompt": prompt, **more}
