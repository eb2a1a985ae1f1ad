from __future__ import annotations

import pytest

from equipoise.errors import CheckpointError, InvalidValueError
from equipoise.text.chat import ChatTemplate, flatten_content

USER = [{"role": "user", "content": "hi"}]


def test_renders_messages_tools_and_special_tokens() -> None:
    template = ChatTemplate(
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
        "{{ tools | tojson }}{% if add_generation_prompt %}>{% endif %}{{ mood }}",
        bos_token="<s>",
        eos_token="</s>",
    )
    assert template.render(USER, [{"name": "é<&"}], mood="ok") == '<s>[user]hi</s>[{"name": "é<&"}]>ok'
    assert template.render(USER, add_generation_prompt=False) == "<s>[user]hi</s>null"


def test_white_space_of_blocks_is_trimmed_as_checkpoints_expect() -> None:
    template = ChatTemplate(
        "{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}"
    )
    assert template.render(USER) == "hi\n"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}", "hi"),
        ("{% for x in [1, 2, 3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}", "1"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ {'b': 1, 'a': [2]} | tojson(indent=1) }}", '{\n "b": 1,\n "a": [\n  2\n ]\n}'),
    ],
)
def test_dialect_of_checkpoints(source: str, expected: str) -> None:
    assert ChatTemplate(source).render(USER) == expected


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{{ nothing.there.at_all }}", "undefined"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for i in range(10000000) %}{% endfor %}", "Range"),
    ],
)
def test_a_template_that_refuses_is_an_error_of_messages(source: str, words: str) -> None:
    with pytest.raises(InvalidValueError, match=words) as caught:
        ChatTemplate(source).render(USER)
    assert caught.value.field == "messages"


def test_a_broken_template_is_an_error_of_the_checkpoint() -> None:
    with pytest.raises(CheckpointError, match="line 2"):
        ChatTemplate("ok\n{% if %}")
    with pytest.raises(CheckpointError, match="nested"):
        ChatTemplate("{{" + "(" * 5000 + "1" + ")" * 5000 + "}}")


def test_content_parts_are_joined() -> None:
    assert flatten_content([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "f") == "a\nb"
    assert flatten_content(None, "f") == ""


def test_images_are_refused_by_name() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    with pytest.raises(InvalidValueError, match="image_url") as caught:
        ChatTemplate("{{ messages }}").render([{"role": "user", "content": parts}])
    assert caught.value.field == "messages[0].content[1]"


def test_tool_call_arguments_reach_the_template_as_objects() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    template = ChatTemplate("{{ messages[0].tool_calls[0].function.arguments.a[0] }}|{{ messages[0].content }}")
    assert template.render([{"role": "assistant", "content": None, "tool_calls": [call]}]) == "1|"


def test_the_developer_is_the_system_unless_the_template_knows_better() -> None:
    message = [{"role": "developer", "content": ""}]
    assert ChatTemplate("{{ messages[0].role }}").render(message) == "system"
    assert ChatTemplate("{# developer #}{{ messages[0].role }}").render(message) == "developer"
