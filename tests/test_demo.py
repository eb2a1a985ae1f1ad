"""The demo model: its files, its tokenizer, its template, and that it adds and counts."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from equipoise import LLM, SamplingParams
from equipoise.demo import demo_model_path
from equipoise.text.chat import ChatTemplate

if TYPE_CHECKING:
    from collections.abc import Iterator

DEMO = demo_model_path()
GREEDY = SamplingParams(temperature=0, max_tokens=100)
ASCII = st.text(st.characters(max_codepoint=127))
ADD = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}}}}
TOOLS = [{"type": "function", "function": ADD}]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    config = json.loads((DEMO / "tokenizer_config.json").read_text(encoding="utf-8"))
    return ChatTemplate(config["chat_template"], None, config["eos_token"])


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", kv_memory_gb=0.25) as engine:
        yield engine


def answers(llm: LLM, questions: list[str]) -> list[str]:
    """What the model says to each question, greedy."""
    outputs = llm.chat([[{"role": "user", "content": question}] for question in questions], GREEDY)
    return [output.outputs[0].text for output in outputs]


def test_it_is_small() -> None:
    assert sum(path.stat().st_size for path in DEMO.iterdir() if path.is_file()) < 4_000_000


@given(ASCII)
def test_ascii_goes_there_and_back(tokenizer: Tokenizer, text: str) -> None:
    encoded = tokenizer.encode(text)
    assert encoded.ids == [ord(character) for character in text]
    assert tokenizer.decode(encoded.ids) == text


def test_special_tokens_are_one_token_each_and_the_rest_is_unknown(tokenizer: Tokenizer) -> None:
    names = ("<unk>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|pad|>")
    assert [tokenizer.encode(name).ids for name in names] == [[128 + n] for n in range(len(names))]
    assert tokenizer.encode("é7☃").ids == [128, ord("7"), 128]
    assert tokenizer.decode([ord("7"), 129]) == "7"


def test_template_renders_every_role(template: ChatTemplate) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Add 1 and 2"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "3"},
    ]
    assert template.render(messages, tools=TOOLS) == (
        "<|system|>Tools: add(a, b)<|end|><|system|>Be kind.<|end|><|user|>Add 1 and 2<|end|>"
        '<|assistant|><tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|end|>'
        "<|user|>Result: 3<|end|><|assistant|>"
    )


def test_it_adds(llm: LLM) -> None:
    rng = random.Random(2)
    pairs = [(rng.randrange(100), rng.randrange(100)) for _ in range(60)]
    phrasings = ("What is {}+{}?", "{} + {} =", "{} plus {}", "Add {} and {}", "how much is {} + {}?")
    questions = [phrasings[n % len(phrasings)].format(a, b) for n, (a, b) in enumerate(pairs)]
    right = [answer == str(a + b) for answer, (a, b) in zip(answers(llm, questions), pairs, strict=True)]
    assert sum(right) >= 0.95 * len(pairs)
    assert answers(llm, ["What is 12+7?"]) == ["19"]


def test_it_counts(llm: LLM) -> None:
    assert answers(llm, ["Count on: 3, 4, 5,", "Continue: 41 42 43", "Count from 3 to 12"]) == [
        "6, 7, 8, 9, 10",
        "44 45 46 47 48",
        "3, 4, 5, 6, 7, 8, 9, 10, 11, 12",
    ]


def test_it_goes_on_with_plain_text(llm: LLM) -> None:
    outputs = llm.generate(["12+7=", "3 4 5 6"], SamplingParams(temperature=0, max_tokens=12))
    assert outputs[0].outputs[0].text == "19"
    assert outputs[1].outputs[0].text == " 7 8 9 10 11"


def test_it_calls_a_tool_and_passes_its_result_on(llm: LLM) -> None:
    asked = [{"role": "user", "content": "What is 12+7?"}]
    called = llm.chat(asked, GREEDY, tools=TOOLS)[0].outputs[0].text
    assert called == '<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": 7}}\n</tool_call>'
    done = [*asked, {"role": "assistant", "content": called}, {"role": "tool", "content": "19"}]
    assert llm.chat(done, GREEDY, tools=TOOLS)[0].outputs[0].text == "19"


def test_it_still_adds_at_the_end_of_a_long_chat(llm: LLM) -> None:
    turns = []
    for n in range(60):
        turns += [{"role": "user", "content": f"What is {n}+7?"}, {"role": "assistant", "content": str(n + 7)}]
    [output] = llm.chat([*turns, {"role": "user", "content": "What is 12+30?"}], GREEDY)
    assert len(output.prompt_token_ids) > 1000
    assert output.outputs[0].text == "42"


def test_transformers_loads_it_and_agrees(llm: LLM) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(DEMO), AutoModelForCausalLM.from_pretrained(DEMO)
    chat = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Count from 5 to 9"}]
    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
    with torch.inference_mode():
        theirs = model.generate(ids, max_new_tokens=100, do_sample=False)[0, ids.shape[1] :].tolist()
    ours = llm.chat(chat, GREEDY)[0]
    assert ours.prompt_token_ids == ids[0].tolist()
    assert ours.outputs[0].token_ids == theirs
