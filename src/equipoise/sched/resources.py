"""Resources: what a step or an admission uses up."""

from __future__ import annotations


class TokenBudget:
    """Tokens that a step may still hold. Prefill chunks are charged in whole units of `unit` tokens.

    `unit` is 1, or the page size when chunks are page-aligned: a chunk then costs ceil(n / unit) * unit."""

    __slots__ = ("left", "max_step_tokens", "unit")

    def __init__(self, max_step_tokens: int, unit: int = 1) -> None:
        self.max_step_tokens = max_step_tokens
        self.unit = unit
        self.left = max_step_tokens

    def begin_step(self) -> None:
        """Fill up for a new step."""
        self.left = self.max_step_tokens

    @property
    def room(self) -> int:
        """Most tokens that one more chunk can have."""
        return self.left - self.left % self.unit

    def charge_decodes(self, n: int) -> None:
        """`n` decode rows, one token each."""
        self.left -= n

    def charge_chunk(self, n: int) -> None:
        """A prefill chunk of `n` tokens, 0 < n <= room."""
        self.left -= -(-n // self.unit) * self.unit

    def refund(self, num_decodes: int, num_chunk_tokens: int) -> None:
        """Undo charges of this step."""
        self.left += num_decodes + -(-num_chunk_tokens // self.unit) * self.unit
