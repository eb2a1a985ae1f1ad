"""What is submitted: a prompt's tokens, a request per choice, and how it is to be served, all checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

import msgspec
import numpy as np

from equipoise.errors import InvalidValueError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from equipoise.exec.protocol import ExecutorInfo
    from equipoise.request import SamplingParams

MAX_SEED = 2**63 - 1
MAX_TOKEN_ID = 2**31 - 1
MAX_PRIORITY = 2**31 - 1


class How(TypedDict, total=False):
    """How a request is served. `request_id`: its name, drawn when not given. `dp_rank`: the rank that must serve it."""

    request_id: str | None
    priority: int
    cache_salt: str
    timeout_s: float | None
    dp_rank: int | None


def split_choices(params: SamplingParams) -> list[SamplingParams]:
    """One request for each of `params.n` choices: n 1 each, and seed + i when a seed is set."""
    if params.n == 1:
        return [params]
    seeds = [None if params.seed is None else _wrap_seed(params.seed + i) for i in range(params.n)]
    return [msgspec.structs.replace(params, n=1, seed=seed) for seed in seeds]


def token_array(prompt: Sequence[int]) -> NDArray[np.int32]:
    """Token ids as they are submitted, (n,) int32. Raises InvalidValueError for anything but a list of integers."""
    try:
        ids = np.asarray(prompt)
    except ValueError:  # ragged
        ids = np.empty((0, 0))
    if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
        raise InvalidValueError("prompt: it must be a text or a list of token ids", "prompt")
    # An id beyond int32 is outside every vocabulary: -1 stands for it.
    return np.where((ids >= 0) & (ids <= MAX_TOKEN_ID), ids, -1).astype(np.int32)


def _wrap_seed(seed: int) -> int:
    return seed if seed <= MAX_SEED else seed - 2**64


def check_request(info: ExecutorInfo, prompt_ids: NDArray[np.int32], params: SamplingParams, how: How) -> None:
    """Raise InvalidValueError, naming the field, unless an executor of `info` can serve this."""
    vocab_size, longest = info.vocab_size, info.max_model_len
    priority, timeout_s = how.get("priority", 0), how.get("timeout_s")
    params.check(vocab_size)
    num_prompt = len(prompt_ids)
    if num_prompt == 0:
        raise InvalidValueError("prompt: it is empty, it must have at least 1 token", "prompt")
    if num_prompt >= longest:
        raise InvalidValueError(
            f"prompt: {num_prompt} tokens, at most {longest - 1} are allowed: "
            f"the model's length is {longest} tokens, prompt and output together",
            "prompt",
            code="context_length_exceeded",
        )
    low, high = int(prompt_ids.min()), int(prompt_ids.max())
    if low < 0 or high >= vocab_size:
        wrong = f"token id {high}" if high >= vocab_size else "a token id"
        raise InvalidValueError(
            f"prompt: {wrong} is outside the vocabulary, it must be at least 0 and at most {vocab_size - 1}",
            "prompt",
        )
    if abs(priority) > MAX_PRIORITY:
        raise InvalidValueError(
            f"priority: {priority} is out of range, it must be at least {-MAX_PRIORITY} and at most {MAX_PRIORITY}",
            "priority",
        )
    if timeout_s is not None and not timeout_s > 0:
        raise InvalidValueError(f"timeout_s: {timeout_s} must be more than 0", "timeout_s")
