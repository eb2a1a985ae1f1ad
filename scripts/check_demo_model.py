"""Ask the demo model much of what it should know and print the table of its card."""

from __future__ import annotations

import random

import demo_examples as examples
from equipoise import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=100)


def cases_by_kind(rng: random.Random) -> dict[str, list[examples.Example]]:
    """Questions with their answers."""
    pairs = [(rng.randrange(100), rng.randrange(100)) for _ in range(1000)]
    unseen = sorted(examples.HELD_OUT)
    phrasings = examples.ADDITIONS
    return {
        "1,000 additions in chat, in every phrasing": [
            examples.chat(phrasings[n % len(phrasings)].format(a=a, b=b), str(a + b)) for n, (a, b) in enumerate(pairs)
        ],
        "500 additions never seen in training, as `What is 12+7?`": [
            examples.chat(f"What is {a}+{b}?", str(a + b)) for a, b in unseen
        ],
        "1,000 additions as plain text, `12+7=`": [(f"{a}+{b}=", f"{a + b}{examples.END}") for a, b in pairs],
        "300 answers as JSON": [examples.json_addition(rng) for _ in range(300)],
        "300 tool calls and results": [examples.tool_addition(rng) for _ in range(300)],
        "300 times counting on": [examples.count_on(rng) for _ in range(300)],
        "300 times counting to": [examples.count_to(rng) for _ in range(300)],
    }


def main() -> None:
    """Greedy, through the engine; an answer is right when all of it is."""
    with LLM("demo", kv_memory_gb=0.5) as llm:
        for kind, cases in cases_by_kind(random.Random(99)).items():
            outputs = llm.generate([prompt for prompt, _ in cases], GREEDY)
            right = sum(
                output.outputs[0].text == answer.removesuffix(examples.END)
                for output, (_, answer) in zip(outputs, cases, strict=True)
            )
            print(f"| {kind} | {100 * right / len(cases):.1f}% |", flush=True)


if __name__ == "__main__":
    main()
