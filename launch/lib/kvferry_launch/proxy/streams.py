"""Keeps the text that the client already has of a streamed answer, so that another server can continue the answer.
This module does no I/O.

The other server answers the whole request again. The proxy checks that the new answer begins with the text that the
client has, and leaves this text out. So a stream can continue only if the same request gives the same text again: with
greedy sampling, or with a seed.
"""

import json

from kvferry_launch.proxy.bodies import CHAT, COMPLETIONS
from kvferry_launch.proxy.first_token import FirstToken, counted_as_output
from kvferry_launch.proxy.json_bodies import Body, encode, json_object

_DONE = b"[DONE]"
_EVENT_END = b"\n\n"
_TAIL_BYTES = 64
# Fields of a request that add data to the events of the answer, which the proxy can't shorten as it shortens the text.
_PER_TOKEN = ("logprobs", "top_logprobs", "prompt_logprobs", "return_token_ids", "tools", "echo")


class BrokenStreamError(Exception):
    """A server's stream can't be passed on; the message says why."""


def gives_the_same_again(path: str, body: Body) -> bool:
    is_fixed = body.get("temperature") == 0 or type(body.get("seed")) is int
    is_one = body.get("n", 1) == 1 and body.get("best_of") in (None, 1)
    return path in (COMPLETIONS, CHAT) and is_fixed and is_one and not any(body.get(name) for name in _PER_TOKEN)


class Stream:
    """Makes one stream for the client from the streams of one or more servers. The caller calls begin() before each
    server's stream, then feed(), which turns the server's bytes into bytes for the client.
    """

    def __init__(self, path: str, body: Body) -> None:
        self.can_go_on = gives_the_same_again(path, body)
        self.done = False
        self._is_chat = path == CHAT
        self._text = ""  # the answer's text that was sent to the client
        self._again = 0  # number of characters of _text that the current server has sent again
        self._servers = 0
        self._goes_on_after: FirstToken | None = None  # token after which the current server's stream starts
        self._names: Body = {}  # the answer's id and creation time, from the first server
        self._pending = b""
        self._tail = _EVENT_END

    def begin(self, first: FirstToken | None = None) -> bytes:
        """Begins a server's stream. `first`: the token that the prefill server sampled, if the stream starts after this
        token.

        Returns the event with this token, which must be sent to the client first. Returns no bytes without `first`.
        """
        self._servers += 1
        self._again, self._pending = 0, b""
        self._goes_on_after = first
        if first is None:
            return b""
        self._text, self._names = first.text, {key: first.names[key] for key in ("id", "created") if key in first.names}
        return _event_of(first.event()) + _EVENT_END

    @property
    def ends_an_event(self) -> bool:
        return self._tail.endswith(_EVENT_END)

    def feed(self, piece: bytes) -> bytes:
        """Takes the server's next bytes, and returns the next bytes for the client. Errors: BrokenStreamError."""
        if not self.can_go_on:
            self._tail = (self._tail + piece)[-_TAIL_BYTES:]
            self.done = _DONE in self._tail
            return piece
        *events, self._pending = (self._pending + piece).split(_EVENT_END)
        taken = [self._taken(event) for event in events]
        return b"".join(event + _EVENT_END for event in taken if event is not None)

    def _taken(self, event: bytes) -> bytes | None:
        """Returns the event to send to the client for a server's event, or None if there is nothing new in it. Errors:
        BrokenStreamError.
        """
        data = event.partition(b"data: ")[2].strip()
        if data == _DONE:
            self.done = True
            return event
        content = json_object(data)
        if content is None:
            return event if self._servers == 1 else None
        if "error" in content:
            raise BrokenStreamError(f"the server sent the error {json.dumps(content['error'])[:200]}")
        if self._goes_on_after is not None:
            content |= self._names
            if "usage" in content:
                content["usage"] = counted_as_output(content["usage"])
            event = _event_of(content)
        choices = content.get("choices") or []
        if len(choices) == 1:
            return self._text_event(event, content, choices[0])
        if len(choices) > 1:
            self.can_go_on = False
        return event if self._servers == 1 else _event_of(content | self._names)

    def _text_event(self, event: bytes, content: Body, choice: Body) -> bytes | None:
        holder, name = (choice.get("delta") or {}, "content") if self._is_chat else (choice, "text")
        text = holder.get(name) or ""
        if self._servers == 1:
            self._names = self._names or {key: content[key] for key in ("id", "created") if key in content}
            self._text += text
            self.can_go_on &= not (self._is_chat and _has_more(holder))
            return event
        known = self._text[self._again : self._again + len(text)]
        if not text.startswith(known):
            raise BrokenStreamError("another server answers the same request with a different text")
        self._again += len(text)
        self._text += text[len(known) :]
        if len(known) == len(text) and not choice.get("finish_reason"):
            return None
        holder[name] = text[len(known) :]
        return _event_of(content | self._names)


def _has_more(delta: Body) -> bool:
    return any(value for key, value in delta.items() if key not in ("role", "content"))


def _event_of(content: Body) -> bytes:
    return b"data: " + encode(content)
