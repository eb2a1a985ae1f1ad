"""A prompt's log-probabilities, which only the prefill leg of a pair has, put into the answer of its decode leg.

What SGLang's own load balancer does for /generate: lists of the prefill's meta_info go before those of the decode's,
in each event where the answer is a stream. All else of the decode's answer keeps its bytes and their order; spaces
between fields do not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from equipoise.gateway.relay.exchange import Exchange
    from equipoise.gateway.transport import Header

MAX_HELD_BYTES = 64 * 2**20
"""Of one leg's answer, kept until it can be merged."""
MERGED = ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs")
"""Lists over the prompt's tokens, in meta_info."""

Lists = dict[str, bytes]
"""What is to go before the lists of MERGED, each as JSON without its brackets."""

_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_items = msgspec.json.Decoder(list[msgspec.Raw])
_encode = msgspec.json.Encoder().encode
_END = b"\n\n"
_DATA = b"data:"


def read_lists(answer: bytes) -> dict[int, Lists]:
    """The lists in the answer of a prefill leg, by the number of the prompt in its batch.

    Raises ValueError when it is neither JSON nor a stream of events with JSON."""
    if not answer.lstrip().startswith(_DATA):
        items = _items.decode(answer) if answer.lstrip().startswith(b"[") else [msgspec.Raw(answer)]
        return {place: _lists(_object.decode(item)) for place, item in enumerate(items)}
    found: dict[int, Lists] = {}
    for event in answer.split(_END):
        payload = _payload(event)
        if payload is not None:
            fields = _object.decode(payload)
            found.setdefault(_index(fields), _lists(fields))  # the first event has them all, as its successors do
    return found


def merge_event(event: bytes, lists: dict[int, Lists]) -> bytes:
    """`event`, without its blank line, with `lists` in it; as it is where that cannot be."""
    payload = _payload(event)
    return event if payload is None else b"data: " + merge(payload, lists)


def merge(answer: bytes, lists: dict[int, Lists]) -> bytes:
    """`answer` (JSON: an object, or a list of them for a batch) with `lists` in it; as it is where it is none."""
    try:
        if answer.lstrip().startswith(b"["):
            parts = [_merged(bytes(item), lists.get(place)) for place, item in enumerate(_items.decode(answer))]
            return b"[%b]" % b",".join(parts)
        return _merged(answer, lists.get(_index(_object.decode(answer))))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return answer


def _merged(item: bytes, lists: Lists | None) -> bytes:
    fields = _object.decode(item)
    if not lists or "meta_info" not in fields:
        return item
    meta = _object.decode(fields["meta_info"])
    for name, values in lists.items():
        own = _inner(meta[name]) if name in meta else b""
        joint = b"," if values and own else b""
        meta[name] = msgspec.Raw(b"[%b%b%b]" % (values, joint, own))
    fields["meta_info"] = msgspec.Raw(_encode(meta))
    return _encode(fields)


def _lists(fields: dict[str, msgspec.Raw]) -> Lists:
    if "meta_info" not in fields:
        return {}
    meta = _object.decode(fields["meta_info"])
    found = {name: _inner(meta[name]) for name in MERGED if name in meta}
    return {name: values for name, values in found.items() if values}


def _inner(values: msgspec.Raw) -> bytes:
    """What is between the brackets of a list; nothing where it is none."""
    text = bytes(values)
    return text[1:-1].strip() if text.startswith(b"[") else b""


def _index(fields: dict[str, msgspec.Raw]) -> int:
    index = bytes(fields.get("index", b"0"))
    return int(index) if index.isdigit() else 0


def _payload(event: bytes) -> bytes | None:
    """The JSON object of an event; None where it has none."""
    text = event.strip()
    payload = text[len(_DATA) :].lstrip() if text.startswith(_DATA) else b""
    return payload if payload.startswith(b"{") else None


class Merging:
    """Between the legs of a pair and the exchange: holds the decode leg's answer until the prefill leg's is whole.

    Told as a Leg what the decode leg tells, while its status is a success."""

    __slots__ = (
        "_exchange", "_head", "_held", "_is_ended", "_is_stream", "_lists", "_num_bytes", "_num_kept", "_prefill",
        "_rest", "_trailers",
    )  # fmt: skip

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._lists: dict[int, Lists] | None = None
        self._head: tuple[int, list[Header]] | None = None
        self._is_stream = self._is_ended = False
        self._prefill: list[bytes] = []
        self._held: list[bytes] = []
        self._rest = b""
        self._trailers: list[Header] = []
        self._num_kept = self._num_bytes = 0

    def keep(self, data: bytes) -> bool:
        """A piece of the prefill leg's answer; False when that is too large."""
        self._num_kept += len(data)
        self._prefill.append(data)
        return self._num_kept <= MAX_HELD_BYTES

    def prefilled(self) -> None:
        """The prefill leg's answer is whole: what was held goes on. Raises ValueError when it is nothing to merge."""
        try:
            self._lists = read_lists(b"".join(self._prefill))
        except UnicodeDecodeError as error:
            raise ValueError(str(error)) from None
        self._prefill.clear()
        if self._head is not None and self._is_stream:
            self._exchange.head(*self._head)
            self._pass_events()
        if self._is_ended:
            self.ended(self._trailers)
        else:
            self._exchange.flush()

    def head(self, status: int, headers: list[Header]) -> None:
        """See Leg. The body will have another length."""
        kept = [header for header in headers if header[0].lower() != b"content-length"]
        kinds = [value.lower() for name, value in headers if name.lower() == b"content-type"]
        self._is_stream = any(kind.startswith(b"text/event-stream") for kind in kinds)
        self._head = (status, kept)
        if self._lists is not None and self._is_stream:
            self._exchange.head(status, kept)

    def body(self, data: bytes) -> bool:
        """See Leg; False when too much would have to be held."""
        self._held.append(data)
        self._num_bytes += len(data)
        if self._lists is not None and self._is_stream:
            self._pass_events()
        return self._num_bytes <= MAX_HELD_BYTES

    def ended(self, trailers: list[Header]) -> None:
        """See Leg."""
        if self._lists is None:
            self._is_ended = True
            self._trailers = trailers
            return
        exchange, head = self._exchange, self._head
        assert head is not None  # an answer begins with it
        rest = b"".join([self._rest, *self._held])
        if not self._is_stream:
            rest = merge(rest, self._lists)
            exchange.head(head[0], [*head[1], (b"content-length", b"%d" % len(rest))])
        if rest:
            exchange.body(rest)
        exchange.ended(trailers)

    def _pass_events(self) -> None:
        """Pass on the events that are whole."""
        assert self._lists is not None
        *events, self._rest = b"".join([self._rest, *self._held]).split(_END)
        self._held.clear()
        self._num_bytes = len(self._rest)
        if events:
            self._exchange.body(b"".join(merge_event(event, self._lists) + _END for event in events))
