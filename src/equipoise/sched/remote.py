"""What a rank is told of KV that travels: from a remote store, to it as a decode rank, from it as a prefill rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from equipoise.errors import InvariantError

if TYPE_CHECKING:
    from equipoise.kv.protocol import KVMemory
    from equipoise.request import Request
    from equipoise.sched.places import Places
    from equipoise.sched.reconcile import Reconciler


class RemoteEvents:
    """Moves requests as their KV comes or is gone. See the methods of the same names of `Scheduler`."""

    def __init__(self, places: Places, kv: KVMemory, reconciler: Reconciler) -> None:
        self._places = places
        self._kv = kv
        self._reconciler = reconciler

    def arrived(self, handle: int, num_tokens: int) -> None:
        """Tokens [0, num_tokens) are in the pages of a loading request."""
        request = self._loading(handle)
        if request is None:
            return
        most = len(request.pages) * self._kv.page_size
        if not 0 <= num_tokens <= most:
            raise InvariantError(f"{num_tokens} tokens arrived for {request}, at most {most} were to come")
        if not request.may_load:
            num_tokens = 0  # flushed meanwhile
        if num_tokens:
            self._kv.publish(request, request.prompt_ids, num_tokens)
        self._places.arrive(request, num_tokens)

    def received(self, handle: int, first_token: int | None) -> Request | None:
        """The prompt's KV is in the pages of a request in transfer, and its first token is known."""
        request = self._loading(handle)
        if request is None:
            return None
        if first_token is None or not request.may_load:  # it failed, or was flushed meanwhile
            self._places.unload(self._places.loading.pop(handle))
            self._reconciler.end(request, "error")
            return request
        self._kv.publish(request, request.prompt_ids, request.num_prompt)
        self._places.receive(request, first_token)
        if request.num_known < request.stop_len and first_token not in request.stop_ids:
            return None
        self._reconciler.end(request, "stop" if first_token in request.stop_ids else "length")
        return request

    def sent(self, handle: int) -> None:
        """Nobody reads the pages of a request in flight any more."""
        request = self._places.sent.get(handle)
        if request is not None:
            self._reconciler.end(request, "length")

    def _loading(self, handle: int) -> Request | None:
        """Who loads; None when it ended meanwhile: its pages are free from now on."""
        ended = self._places.quarantine.pop(handle, None)
        if ended is not None:
            self._kv.release(ended)
            return None
        request = self._places.loading.get(handle)
        if request is None:
            raise InvariantError(f"request #{handle} loads nothing")
        return request
