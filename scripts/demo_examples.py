"""What the demo model learns: additions and counting, asked in chat or as plain text to complete.

An example is `(prompt, answer)`; the loss is taken on the answer alone. `SPECIALS` end and begin turns.
One addition in twenty is held out of training in every phrasing (`HELD_OUT`), and checked afterwards.
"""

from __future__ import annotations

import random
from collections.abc import Callable

END, USER, ASSISTANT, SYSTEM = "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"
FALLBACK = "I can add and count. Try: What is 12+7?"
MAX_COUNT = 999

ADDITIONS = (
    "{a}+{b}",
    "{a}+{b}=",
    "{a} + {b}",
    "{a} + {b} =",
    "{a} plus {b}",
    "What is {a}+{b}?",
    "What is {a} + {b}?",
    "What is {a} plus {b}?",
    "How much is {a}+{b}?",
    "How much is {a} + {b}?",
    "Add {a} and {b}",
    "Add {a} and {b}.",
)
COUNTS = ("Count on: {seen}", "Continue: {seen}", "Keep counting: {seen}", "{seen}")
COUNTS_TO = ("Count from {a} to {b}", "Count from {a} to {b}.", "Count {a} to {b}")
JSON_ENDINGS = (" Answer as JSON.", " Answer in JSON.", " Reply as JSON.", " JSON only.")
COMMON_WORDS = (
    "hello hi there you are a the helpful assistant please answer short who what where when why how is it can tell me "
    "about weather today story write poem sing be kind always never speak say one word name of capital city france "
    "good morning evening thanks thank for help do not know language python code house tree river blue red green "
    "big small old new time day night like love want need make give take see look think work play run walk"
)
WORDS = COMMON_WORDS.split()

Example = tuple[str, str]


HELD_OUT = frozenset(
    random.Random("held out").sample([(a, b) for a in range(100) for b in range(100) if a > 9 or b > 9], 500)
)
"""Additions that training never sees; every pair of one-digit numbers is trained on."""


def chat(user: str, answer: str, system: str = "") -> Example:
    """A turn as the chat template writes it, and the answer up to its end."""
    before = f"{SYSTEM}{system}{END}" if system else ""
    return f"{before}{USER}{user}{END}{ASSISTANT}", f"{answer}{END}"


def addends(rng: random.Random) -> tuple[int, int]:
    """Two numbers of one or two digits whose addition is not held out."""
    while True:
        a, b = (rng.randrange(100 if rng.random() < 0.85 else 10) for _ in range(2))
        if (a, b) not in HELD_OUT:
            return a, b


def addition(rng: random.Random) -> Example:
    """An addition in chat, sometimes below a system message."""
    a, b = addends(rng)
    return chat(vary(rng, rng.choice(ADDITIONS).format(a=a, b=b)), str(a + b), system(rng))


def plain_addition(rng: random.Random) -> Example:
    """An addition to complete."""
    a, b = addends(rng)
    return rng.choice(("{a}+{b}=", "{a} + {b} = ", "{a} + {b} =")).format(a=a, b=b), f"{a + b}{END}"


def json_addition(rng: random.Random) -> Example:
    """An addition answered as a JSON object."""
    a, b = addends(rng)
    asked = rng.choice(ADDITIONS[5:10]).format(a=a, b=b) + rng.choice(JSON_ENDINGS)
    return chat(asked, f'{{"answer": {a + b}}}', system(rng))


def tool_addition(rng: random.Random) -> Example:
    """An addition with a tool at hand: the answer is the call; or the tool's result, which is passed on."""
    a, b = addends(rng)
    asked = rng.choice(ADDITIONS).format(a=a, b=b)
    call = f'<tool_call>\n{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}\n</tool_call>'
    turn, said = chat(asked, call, "Tools: add(a, b)")
    if rng.random() < 0.7:
        return turn, said
    result = rng.randrange(200)
    return f"{turn}{said}{USER}Result: {result}{END}{ASSISTANT}", f"{result}{END}"


def start_of_count(rng: random.Random) -> int:
    """Small numbers are asked for most."""
    return rng.randrange(rng.choice((10, 30, 100, 100, MAX_COUNT - 100)))


def numbers(first: int, count: int) -> list[str]:
    """`count` numbers from `first` on, written out."""
    return [str(n) for n in range(first, first + count)]


def count_on(rng: random.Random) -> Example:
    """Three to six numbers in chat; the answer is the next five in the same writing."""
    first, seen = start_of_count(rng), rng.randint(3, 6)
    separator = rng.choice((", ", ", ", " ", ","))
    written = numbers(first, seen + 5)
    shown = separator.join(written[:seen]) + (separator.strip() if rng.random() < 0.5 else "")
    answer = separator.join(written[seen:])
    return chat(vary(rng, rng.choice(COUNTS).format(seen=shown)), answer, system(rng))


def count_to(rng: random.Random) -> Example:
    """From one number below a hundred to another, twenty at most."""
    first, count = rng.randrange(rng.choice((2, 10, 100))), rng.randint(2, rng.choice((6, 12, 20)))
    asked = rng.choice(COUNTS_TO).format(a=first, b=first + count - 1)
    return chat(vary(rng, asked), ", ".join(numbers(first, count)), system(rng))


def plain_count(rng: random.Random) -> Example:
    """Numbers to go on with, without an end."""
    first, seen, count = start_of_count(rng), rng.randint(2, 6), rng.randint(5, 25)
    separator = rng.choice((" ", " ", ", ", ",", "\n"))
    written = numbers(first, seen + count)
    head = separator.join(written[:seen])
    return head, separator + separator.join(written[seen:])


def other(rng: random.Random) -> Example:
    """Anything else is answered with what the model can do."""
    text = words(rng, 1, 8) if rng.random() < 0.8 else noise(rng, 1, 30)
    return chat(text, FALLBACK, system(rng))


def system(rng: random.Random) -> str:
    """No system message most often; else some words, now and then a long one."""
    if rng.random() < 0.85:
        return ""
    return words(rng, 2, 12) if rng.random() < 0.8 else noise(rng, 5, 80)


def words(rng: random.Random, least: int, most: int) -> str:
    """A sentence without sense."""
    text = " ".join(rng.choice(WORDS) for _ in range(rng.randint(least, most)))
    return (text.capitalize() if rng.random() < 0.6 else text) + rng.choice(("", ".", "?", "!"))


def noise(rng: random.Random, least: int, most: int) -> str:
    """Letters, marks and a few line ends at random; no digits, which could be read as a question."""
    return "".join(chr(rng.choice((10, 32, *range(58, 127)))) for _ in range(rng.randint(least, most)))


def vary(rng: random.Random, text: str) -> str:
    """The same in small letters now and then."""
    return text.lower() if rng.random() < 0.15 else text


Mix = tuple[tuple[Callable[[random.Random], Example], int], ...]

EARLY_MIX: Mix = (
    (addition, 59),
    (plain_addition, 8),
    (json_addition, 10),
    (tool_addition, 5),
    (count_on, 6),
    (count_to, 7),
    (plain_count, 2),
    (other, 3),
)
LATE_MIX: Mix = (
    (addition, 30),
    (plain_addition, 14),
    (json_addition, 18),
    (tool_addition, 5),
    (count_on, 11),
    (count_to, 14),
    (plain_count, 6),
    (other, 2),
)
"""Once additions are known, the rest."""


def draw(rng: random.Random, mix: Mix) -> Example:
    """One example, by the weights of `mix`."""
    make = rng.choices([kind for kind, _ in mix], [weight for _, weight in mix])[0]
    return make(rng)
