"""Take the README's picture of the dashboard: the demo model under a swelling load, seen by a headless Chromium.

    python scripts/picture_dashboard.py [--seconds 88] [--dark] [--out docs/dashboard.png]

Needs Chromium (Debian: chromium).
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.browser import Browser, find_chromium  # noqa: E402
from tests.serving import serve  # noqa: E402

FLAGS = ("--model", "demo", "--max-running", "24", "--kv-memory-gb", "0.014", "--num-threads", "1")
SWELL_S = 40.0


async def ask(client: httpx.AsyncClient, rng: random.Random) -> None:
    """One chat with a system message that many share, or a long count."""
    if rng.random() < 0.5:
        system = {"role": "system", "content": f"You are helpful assistant number {rng.randrange(3)}. Be short."}
        first = rng.randrange(80)
        question = {"role": "user", "content": f"Count from {first} to {first + rng.randrange(5, 20)}"}
        await client.post("/v1/chat/completions", json={"messages": [system, question], "max_tokens": 100})
    else:
        first, length = rng.randrange(100), rng.randrange(50, 250)
        prompt = " ".join(str(n) for n in range(first, first + rng.randrange(3, 30)))
        await client.post("/v1/completions", json={"prompt": prompt, "max_tokens": length, "temperature": 0})


async def load(url: str, until: float, rate: float) -> None:
    """Requests at a rate that rises and falls, up to `until` (monotonic seconds)."""
    rng, tasks = random.Random(0), set()
    started = time.monotonic()
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits(max_connections=500)) as client:
        while (now := time.monotonic()) < until:
            task = asyncio.create_task(ask(client, rng))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            swell = 1 + 0.8 * math.sin(2 * math.pi * (now - started) / SWELL_S)
            await asyncio.sleep(rng.expovariate(rate * swell))
        await asyncio.gather(*tasks)


def take(browser: Browser, url: str, args: argparse.Namespace) -> None:
    """Let the charts fill, ask a question, take the picture."""
    browser.open(url)
    time.sleep(args.seconds)
    for question in ("What is 12+7?", "Count from 3 to 12"):
        browser.run(f"document.getElementById('prompt').value = '{question}'")
        browser.run("document.getElementById('send').click()")
        browser.wait("document.getElementById('send').textContent === 'Send'", 60)
    browser.screenshot(args.out, dark=args.dark)
    print(f"{args.out}: {args.out.stat().st_size:,} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=88)
    parser.add_argument("--rate", type=float, default=22.0, help="requests per second, on average")
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "dashboard.png")
    args = parser.parse_args()
    program = find_chromium()
    if program is None:
        sys.exit("no Chromium found")
    with serve(*FLAGS) as server, tempfile.TemporaryDirectory() as profile:
        until = time.monotonic() + args.seconds + 3
        loader = threading.Thread(target=lambda: asyncio.run(load(server.url, until, args.rate)))
        loader.start()
        with Browser(program, Path(profile)) as browser:
            take(browser, server.url, args)
        loader.join()


if __name__ == "__main__":
    main()
