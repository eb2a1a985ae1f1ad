"""One step on the device: input tokens, forward, sampling, and the copy back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from equipoise.exec.protocol import StepOutput
from equipoise.exec.torch.logprobs import prompt_logprobs

if TYPE_CHECKING:
    from torch import Tensor

    from equipoise.exec.protocol import TokenLogprobs
    from equipoise.exec.torch.batch import Batch
    from equipoise.exec.torch.models.protocol import Model
    from equipoise.exec.torch.sampler import Sampled, Sampler


@dataclass(frozen=True, eq=False)
class Launched:
    """A step whose work is queued on the device; on a CPU it is done. `event` marks its end on a GPU."""

    tokens: Tensor  # (S,) int32 on the host
    event: torch.cuda.Event | None
    sampled: Sampled
    prompt_logprobs: dict[int, list[TokenLogprobs]]

    def done(self) -> bool:
        return self.event is None or self.event.query()

    def wait(self) -> StepOutput:
        if self.event is not None:
            self.event.synchronize()
        return StepOutput(
            tokens=self.tokens.numpy(),
            logprobs=self.sampled.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            failed=self.sampled.failed,
        )


class Runner:
    """Runs batches in order. Everything here is called from one thread.

    `last_token`: (num_seats,) int64 on the device, the last token drawn for each seat: what a decode reads,
    so that no step waits for the host to see the tokens of the one before."""

    def __init__(self, model: Model, sampler: Sampler, num_seats: int, device: torch.device) -> None:
        self._model = model
        self._sampler = sampler
        self._device = device
        self._last_token = torch.zeros(num_seats, dtype=torch.int64, device=device)

    @torch.inference_mode()
    def run(self, batch: Batch) -> Launched:
        """Launch one step; on a CPU this computes it."""
        for seating in batch.seatings:
            self._sampler.seat(seating.seat, seating.request, seating.known)
        token_ids = batch.token_ids
        token_ids[: batch.num_decodes] = self._last_token[batch.decode_seats]
        logits = self._model.forward(token_ids, batch)
        num_sampled = len(batch.sampled_seats)
        sampled = self._sampler.sample(logits[:num_sampled], batch.sampled_seats, batch.sampled_at)
        self._last_token[self._to_device(batch.sampled_seats)] = sampled.tokens
        scored = self._score_prompts(logits[num_sampled:], batch)
        tokens = sampled.tokens.to(torch.int32)
        if self._device.type == "cpu":
            return Launched(tokens, None, sampled, scored)
        host = torch.empty(tokens.shape, dtype=torch.int32, pin_memory=True)
        host.copy_(tokens, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return Launched(host, event, sampled, scored)

    def _score_prompts(self, logits: Tensor, batch: Batch) -> dict[int, list[TokenLogprobs]]:
        """logits: the rows after the sampled ones, span after span."""
        scored, first = {}, 0
        for span in batch.prompt_spans:
            rows = logits[first : first + len(span.targets)]
            scored[span.handle] = prompt_logprobs(rows, self._to_device(span.targets), span.num_top)
            first += len(span.targets)
        return scored

    def _to_device(self, values: np.ndarray[tuple[int], np.dtype[np.int32 | np.int64]]) -> Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self._device)
