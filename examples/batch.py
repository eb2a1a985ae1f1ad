"""Answer a batch of prompts without a server: `python examples/batch.py [CHECKPOINT]`."""

import sys

from equipoise import LLM, SamplingParams


def main() -> None:
    prompts = [f"{a}+{b}=" for a in (1, 12, 25) for b in (7, 30)]
    with LLM(sys.argv[1] if len(sys.argv) > 1 else "demo") as llm:
        for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8)):
            print(output.prompt, output.outputs[0].text)


if __name__ == "__main__":
    main()
