"""Resources: what a step or an admission uses up."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from equipoise.request import Request


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


class LoraSlots:
    """At most `max_loras` different adapters run at once; requests without an adapter always fit."""

    name = "lora"

    def __init__(self, max_loras: int) -> None:
        self._max_loras = max_loras
        self._users: dict[str, set[int]] = {}
        self._has_changed = False

    def check(self, request: Request) -> None:
        """Any adapter fits when no other runs."""

    def begin_step(self) -> bool:
        """True when an adapter came or went since the last step."""
        changed, self._has_changed = self._has_changed, False
        return changed

    def share(self, request: Request) -> str:
        """The adapter."""
        return request.lora or ""

    def fit(self, request: Request, _n: int) -> bool:
        """Is its adapter running, or a slot free?"""
        lora = request.lora
        return lora is None or lora in self._users or len(self._users) < self._max_loras

    def take(self, request: Request, _n: int) -> None:
        """Its adapter runs from now on, if it did not."""
        lora = request.lora
        if lora is not None:
            self._has_changed |= lora not in self._users
            self._users.setdefault(lora, set()).add(request.handle)

    def give_back(self, request: Request) -> None:
        """One user less; the last one frees the slot."""
        lora = request.lora
        if lora is None:
            return
        self._users[lora].discard(request.handle)
        if not self._users[lora]:
            del self._users[lora]
            self._has_changed = True
