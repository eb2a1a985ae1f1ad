"""How many tokens a request will have, learnt per model from the `usage` of replies.

Without a tokenizer the gateway knows bytes: a prompt has `bytes / bytes per token` tokens, and an output is as long
as outputs of that model lately were. Both are quotients of sums that fade, so long prompts weigh as much as
they cost. What a single reply can do is bounded: an image in base64 or a wrong `usage` moves little.
"""

from __future__ import annotations

KEPT = 0.98
"""Of the sums, what is kept at each reply: the last 50 replies weigh most."""
PRIOR_PROMPT_BYTES, PRIOR_PROMPT_TOKENS = 4096.0, 1024.0
PRIOR_OUTPUT = 256.0
MAX_FACTOR = 4.0
"""A reply's own quotient counts as at most this many times the learnt one, and at least its inverse."""
MAX_WEIGHT_BYTES = 65536
MAX_MODELS = 256


class ModelLengths:
    """The fading sums of one model."""

    __slots__ = ("num_replies", "output_tokens", "prompt_bytes", "prompt_tokens")

    def __init__(self) -> None:
        self.prompt_bytes = PRIOR_PROMPT_BYTES
        self.prompt_tokens = PRIOR_PROMPT_TOKENS
        self.output_tokens = PRIOR_OUTPUT
        self.num_replies = 1.0

    @property
    def bytes_per_token(self) -> float:
        """Of prompts."""
        return self.prompt_bytes / self.prompt_tokens

    @property
    def mean_output(self) -> float:
        """Tokens."""
        return self.output_tokens / self.num_replies

    def learn_prompt(self, num_bytes: int, num_tokens: int) -> None:
        """A prompt of `num_bytes` had `num_tokens`."""
        learnt = self.prompt_bytes / self.prompt_tokens
        weight = num_bytes if num_bytes < MAX_WEIGHT_BYTES else MAX_WEIGHT_BYTES
        own = num_bytes / num_tokens
        if not learnt / MAX_FACTOR < own < learnt * MAX_FACTOR:
            own = min(max(own, learnt / MAX_FACTOR), learnt * MAX_FACTOR)
        self.prompt_bytes = KEPT * self.prompt_bytes + weight
        self.prompt_tokens = KEPT * self.prompt_tokens + weight / own

    def learn_output(self, num_tokens: int) -> None:
        """An output had `num_tokens`."""
        own = float(num_tokens)
        if own > MAX_FACTOR:  # a mean below 1 counts as 1
            own = min(own, MAX_FACTOR * max(self.mean_output, 1.0))
        self.output_tokens = KEPT * self.output_tokens + own
        self.num_replies = KEPT * self.num_replies + 1.0


class Lengths:
    """What is known of at most `max_models` models; the one that learnt nothing for the longest time is forgotten."""

    def __init__(self, max_models: int = MAX_MODELS) -> None:
        self._max_models = max_models
        self._models: dict[str | None, ModelLengths] = {}
        self._unknown = ModelLengths()

    def __len__(self) -> int:
        return len(self._models)

    def num_prompt(self, model: str | None, num_bytes: int) -> int:
        """Tokens that a prompt of `num_bytes` will have, at least 1."""
        lengths = self._models.get(model, self._unknown)
        return int(num_bytes * lengths.prompt_tokens / lengths.prompt_bytes) or 1

    def num_output(self, model: str | None, max_tokens: int | None) -> int:
        """Tokens that will be generated, at most `max_tokens`."""
        lengths = self._models.get(model, self._unknown)
        expected = int(lengths.output_tokens / lengths.num_replies)
        return expected if max_tokens is None or expected < max_tokens else max_tokens

    def learn(self, model: str | None, prompt_bytes: int, prompt_tokens: int, output_tokens: int | None) -> None:
        """A reply said how long the prompt was and, unless None, how long the answer. Counts below 1 say nothing of
        prompts, counts below 0 nothing of outputs."""
        lengths = self._models.pop(model, None) or ModelLengths()
        if len(self._models) >= self._max_models:
            del self._models[next(iter(self._models))]
        self._models[model] = lengths
        if prompt_bytes > 0 and prompt_tokens > 0:
            lengths.learn_prompt(prompt_bytes, prompt_tokens)
        if output_tokens is not None and output_tokens >= 0:
            lengths.learn_output(output_tokens)
