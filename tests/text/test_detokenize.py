"""Incremental detokenizing equals decoding at once; stop handling equals a search in the whole text."""

from __future__ import annotations

from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests import tiny_tokenizer
from tokenizers import Tokenizer as Backend

from equipoise.request import SamplingParams
from equipoise.text.detokenize import TableText, WindowText, build_detokenizer
from equipoise.text.tokenizer import Tokenizer
from equipoise.text.tokenizer_files import FolderFacts

if TYPE_CHECKING:
    from collections.abc import Iterable

BYTE_LEVEL_SIZE = 361


@cache
def load(family: str) -> Tokenizer:
    data = getattr(tiny_tokenizer, family)()
    return Tokenizer(Backend.from_str(data), msgspec.json.decode(data)["decoder"], FolderFacts())


def deltas(family: str, ids: Iterable[int], params: SamplingParams, prompt: list[int] | None = None) -> list[str]:
    """What each push shows, and last what finish shows; ends at a stop string."""
    detokenizer = build_detokenizer(load(family), params, prompt or [])
    shown = []
    for token in ids:
        shown.append(detokenizer.push(token))
        if detokenizer.stopped_by is not None:
            return shown
    return [*shown, detokenizer.finish()]


byte_level_ids = st.lists(st.integers(0, BYTE_LEVEL_SIZE), max_size=40)
texts = st.lists(st.sampled_from(["hello", " world", "é", "漢字", "🙂", " a b", ",", "<s>", "x"])).map("".join)


@given(byte_level_ids, st.booleans())
def test_byte_level_deltas_join_to_the_decoded_text(ids: list[int], skip: bool) -> None:
    params = SamplingParams(skip_special_tokens=skip)
    assert "".join(deltas("byte_level", ids, params)) == load("byte_level").decode(ids, skip)


@given(texts, st.booleans())
def test_sentencepiece_deltas_join_to_the_text(text: str, skip: bool) -> None:
    tokenizer = load("sentencepiece")
    ids = tokenizer.encode(text).tolist()
    shown = "".join(deltas("sentencepiece", ids, SamplingParams(skip_special_tokens=skip)))
    # The library's decoder strips the space that a text begins with; an answer keeps it.
    assert shown.removeprefix(" ") == tokenizer.decode(ids, skip)
    assert shown == (text.replace("<s>", "") if skip else text)


@given(st.lists(st.integers(3, 258), max_size=30))
def test_sentencepiece_bytes_are_utf8(ids: list[int]) -> None:
    raw = bytes(token - len(tiny_tokenizer.SPECIAL) for token in ids)
    assert "".join(deltas("sentencepiece", ids, SamplingParams())) == raw.decode("utf-8", "replace")


@given(st.lists(st.integers(0, 11), max_size=30), st.lists(st.integers(3, 11), max_size=6), st.booleans())
def test_other_decoders_continue_the_prompt(ids: list[int], prompt: list[int], skip: bool) -> None:
    tokenizer = load("wordpiece")
    whole = tokenizer.decode(prompt + ids, skip)
    shown = "".join(deltas("wordpiece", ids, SamplingParams(skip_special_tokens=skip), prompt))
    assert tokenizer.decode(prompt, skip) + shown == whole


def test_special_tokens_do_not_displace_the_context() -> None:
    hel = load("wordpiece").backend.token_to_id("hel")
    assert deltas("wordpiece", [0] * 9 + [hel], SamplingParams(), [hel] + [1] * 9)[9] == " hel"


def test_families_are_told_apart() -> None:
    kinds = {family: type(build_detokenizer(load(family), SamplingParams(), [])) for family in FAMILIES}
    assert kinds == {"byte_level": TableText, "sentencepiece": TableText, "wordpiece": WindowText}


FAMILIES = ("byte_level", "sentencepiece", "wordpiece")


@given(byte_level_ids)
def test_window_agrees_with_table(ids: list[int]) -> None:
    """The general detokenizer, on a vocabulary where the fast one is exact, up to where U+FFFD begins."""
    tokenizer = load("byte_level")
    window = WindowText(tokenizer, True, [])
    shown = "".join([*map(window.push, ids), window.finish()])
    whole = tokenizer.decode(ids)
    if "\ufffd" not in whole:
        assert shown == whole


def test_a_split_character_is_held_back() -> None:
    ids = [load("byte_level").backend.token_to_id(token) for token in ("h", "Ã", "©", "x")]
    assert deltas("byte_level", ids, SamplingParams()) == ["h", "", "é", "x", ""]
    assert deltas("byte_level", ids[:2], SamplingParams()) == ["h", "", "\ufffd"]


# ---------------------------------------------------------------- stop strings


def naive_stop(pieces: list[str], stops: list[str], min_tokens: int) -> tuple[str, str | None]:
    """(text before the stop string that is completed first, that string), by looking at every prefix."""
    text = "".join(pieces)
    ends = [0, *accumulate(map(len, pieces))]
    for end in range(1, len(text) + 1):
        num_tokens = next(i for i, at in enumerate(ends) if at >= end)
        found = [stop for stop in stops if text[:end].endswith(stop) and num_tokens >= min_tokens]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


abc_ids = [load("byte_level").backend.token_to_id(token) for token in "abc"]
stop_strings = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4)


@given(st.lists(st.sampled_from("abc"), max_size=25), stop_strings, st.integers(0, 10), st.booleans())
def test_stop_strings_across_tokens(letters: list[str], stops: list[str], min_tokens: int, include: bool) -> None:
    params = SamplingParams(
        stop=tuple(stops), min_tokens=min_tokens, max_tokens=None, include_stop_str_in_output=include
    )
    detokenizer = build_detokenizer(load("byte_level"), params, [])
    shown = ""
    for letter in letters:
        shown += detokenizer.push(abc_ids["abc".index(letter)])
        if detokenizer.stopped_by is not None:
            break
    else:
        shown += detokenizer.finish()
    text, stop = naive_stop(letters, stops, min_tokens)
    assert detokenizer.stopped_by == stop
    assert shown == text + (stop or "" if include else "")


@given(st.lists(st.text("abc", min_size=1, max_size=6), max_size=12), stop_strings, st.integers(0, 6))
def test_stop_strings_within_long_tokens(pieces: list[str], stops: list[str], min_tokens: int) -> None:
    """Tokens of several characters: the string completed first counts, wherever the token ends."""
    from equipoise.text.detokenize import StoppingText

    detokenizer = StoppingText(Spelled(pieces), tuple(stops), min_tokens, False)
    shown = ""
    for i in range(len(pieces)):
        shown += detokenizer.push(i)
        if detokenizer.stopped_by is not None:
            break
    else:
        shown += detokenizer.finish()
    assert (shown, detokenizer.stopped_by) == naive_stop(pieces, stops, min_tokens)


class Spelled:
    """A detokenizer whose i-th token has the i-th piece as its text."""

    stopped_by: str | None = None

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces

    def push(self, token_id: int) -> str:
        return self.pieces[token_id]

    def finish(self) -> str:
        return ""


@pytest.mark.parametrize(
    ("letters", "stops", "expected"),
    [
        ("abcabx", ("abx",), ["", "", "abc", "", "", ""]),
        ("aabb", ("ab",), ["", "a", ""]),
        ("cc", ("ab",), ["c", "c", ""]),
        ("ca", ("ab",), ["c", "", "a"]),
        ("cab", ("b", "ab"), ["c", "", ""]),
        ("cab", ("ab", "b"), ["c", "", ""]),
        ("aba", ("aab",), ["", "ab", "", "a"]),
    ],
)
def test_only_a_possible_beginning_is_held(letters: str, stops: tuple[str, ...], expected: list[str]) -> None:
    ids = [load("byte_level").backend.token_to_id(letter) for letter in letters]
    assert deltas("byte_level", ids, SamplingParams(stop=stops)) == expected
