"""One step on the device: input tokens, forward, sampling, and the copy back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from equipoise.exec.protocol import StepOutput
from equipoise.exec.torch.hostcopy import HostCopy
from equipoise.exec.torch.logprobs import prompt_logprobs

if TYPE_CHECKING:
    from torch import Tensor

    from equipoise.exec.protocol import TokenLogprobs
    from equipoise.exec.torch.batch import Batch
    from equipoise.exec.torch.models.protocol import Model
    from equipoise.exec.torch.sampler import Sampled, Sampler


@dataclass(frozen=True, eq=False)
class Launched:
    """A step whose work is queued on the device; on a CPU it is done. tokens: (S,) int32."""

    tokens: HostCopy
    sampled: Sampled
    prompt_logprobs: dict[int, list[TokenLogprobs]]

    def done(self) -> bool:
        """True when `wait` would not wait."""
        return self.tokens.is_done()

    def wait(self) -> StepOutput:
        """What the step computed, once the device has computed it; `failed` by row."""
        (tokens,) = self.tokens.wait()
        return StepOutput(
            tokens=tokens.numpy(),
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
        self._last_token[batch.sampled_index] = sampled.tokens
        scored = self._score_prompts(logits[num_sampled:], batch)
        return Launched(HostCopy(sampled.tokens.to(torch.int32)), sampled, scored)

    def _score_prompts(self, logits: Tensor, batch: Batch) -> dict[int, list[TokenLogprobs]]:
        """logits: the rows after the sampled ones, span after span."""
        scored, first = {}, 0
        for span in batch.prompt_spans:
            rows = logits[first : first + len(span.targets)]
            targets = torch.from_numpy(span.targets.astype(np.int64)).to(self._device)
            scored[span.handle] = prompt_logprobs(rows, targets, span.num_top)
            first += len(span.targets)
        return scored
