"""The live page in a real browser, before a real server."""

from __future__ import annotations

import signal
import urllib.request
from typing import TYPE_CHECKING

import psutil
import pytest
from tests import serving
from tests.browser import Browser, find_chromium

from equipoise.dashboard import dashboard_path

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CHROMIUM = find_chromium()
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (Debian: chromium)")


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with Browser(CHROMIUM or "", tmp_path / "profile") as page:
        yield page
        assert page.errors == []


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return serving.write_tiny_tokenizer(tmp_path / "tokenizer")


def text_of(browser: Browser, element: str) -> str:
    return str(browser.run(f"document.getElementById('{element}').textContent"))


def wait_for_state(browser: Browser, state: str) -> None:
    browser.wait(f"document.getElementById('state').textContent === '{state}'")


def test_page_fetches_nothing_from_elsewhere() -> None:
    page = dashboard_path().read_text(encoding="utf-8")
    assert "://" not in page.replace("http://www.w3.org/2000/svg", "").replace("http%3A", "")


def test_server_serves_the_page_at_its_root(tokenizer: Path) -> None:
    with serving.serve(*serving.sim_flags(tokenizer)) as server, urllib.request.urlopen(server.url) as answer:
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert answer.read() == dashboard_path().read_bytes()


@needs_chromium
def test_page_shows_load_streams_a_chat_and_says_when_the_server_is_gone(browser: Browser, tokenizer: Path) -> None:
    with serving.serve(*serving.sim_flags(tokenizer, "--max-running", "7", step_ms=4.0)) as server:
        browser.open(server.url)
        wait_for_state(browser, "live")
        assert text_of(browser, "model").startswith(server.name)
        assert text_of(browser, "running") == "0of 7 seats"
        assert browser.run("document.querySelectorAll('.rank').length") == 1

        browser.run("document.getElementById('prompt').value = 'Say something long'")
        browser.run("document.getElementById('send').click()")
        browser.wait("document.querySelector('.answer').textContent.length > 3")
        browser.wait("document.getElementById('running').textContent.startsWith('1of')")
        assert browser.run("document.getElementById('send').textContent") == "Stop"
        browser.wait("document.getElementById('send').textContent === 'Send'")
        assert "512 tokens" in text_of(browser, "pace")
        finished = "[...document.querySelectorAll('#totals dd')][0].textContent"
        browser.wait(f"{finished} === '1'")
        assert browser.run("document.querySelector('#pace-chart .line').getAttribute('d').length") > 0

        server.signal(signal.SIGTERM)
        server.wait()
        wait_for_state(browser, "no answer")
        assert "last seen" in text_of(browser, "notice")


@needs_chromium
def test_ranks_stand_side_by_side_and_one_that_is_gone_is_named(browser: Browser, tokenizer: Path) -> None:
    flags = serving.sim_flags(tokenizer, "--dp-size", "3", "--max-running", "7", "--no-restart-ranks")
    with serving.serve(*flags) as server:
        browser.open(server.url)
        wait_for_state(browser, "live")
        titles = "[...document.querySelectorAll('.rank b')].map(title => title.textContent).join()"
        assert browser.run(titles) == "Rank 0,Rank 1,Rank 2"
        assert text_of(browser, "running") == "0of 21 seats"
        assert text_of(browser, "ranks-title") == "3 ranks"
        psutil.Process(server.pid).children()[0].kill()
        wait_for_state(browser, "degraded")
        assert "was killed by signal 9 (SIGKILL)" in text_of(browser, "notice")
        assert text_of(browser, "ranks-title") == "2 ranks, 1 missing"
        assert browser.run("document.querySelectorAll('.rank').length") == 2


@needs_chromium
def test_stop_ends_the_request_on_the_server(browser: Browser, tokenizer: Path) -> None:
    with serving.serve(*serving.sim_flags(tokenizer, step_ms=50.0)) as server:
        browser.open(server.url)
        wait_for_state(browser, "live")
        browser.run("document.getElementById('send').click()")
        browser.wait("document.querySelector('.answer').textContent.length > 3")
        browser.run("document.getElementById('send').click()")
        aborted = "[...document.querySelectorAll('#totals dd')][1].textContent"
        browser.wait(f"{aborted} === '1'")
        browser.wait("document.getElementById('running').textContent.startsWith('0of')")


@needs_chromium
def test_page_asks_for_the_key_and_works_with_it(browser: Browser, tokenizer: Path) -> None:
    with serving.serve(*serving.sim_flags(tokenizer, "--api-key", "s3cret")) as server:
        browser.open(server.url)
        wait_for_state(browser, "locked")
        assert "API key" in text_of(browser, "notice")
        browser.run("document.getElementById('key').value = 's3cret'")
        browser.run("document.getElementById('key').dispatchEvent(new Event('change'))")
        wait_for_state(browser, "live")
        assert text_of(browser, "notice") == ""


@needs_chromium
def test_a_refused_chat_shows_the_servers_message(browser: Browser, tmp_path: Path) -> None:
    bare = serving.write_tiny_tokenizer(tmp_path / "bare", chat_template=None)
    with serving.serve(*serving.sim_flags(bare)) as server:
        browser.open(server.url)
        wait_for_state(browser, "live")
        browser.run("document.getElementById('send').click()")
        assert "template" in browser.wait("document.querySelector('.error')?.textContent")
