"""The trace of one request, without spans: servers continue the client's trace or, if it sent none, a new trace."""

from kvferry_launch.proxy.nodes import Node
from kvferry_launch.proxy.trace_context import Headers, new_context, of_client


class RequestTrace:
    """Passes the trace context of a request on to servers. The subclass spans.SpannedTrace records spans too."""

    def __init__(self, path: str, headers: Headers) -> None:
        del path  # only a span needs the path
        self._context = of_client(headers) or new_context()

    @property
    def trace_id(self) -> str:
        return self._context.trace_id

    def headers(self) -> dict[str, str]:
        """Returns the headers for a request that is sent to a server in the current stage."""
        return self._context.headers()

    def enter(self, stage: str, node: Node | None) -> None:
        """Begins a stage of the request; see RequestLog."""

    def leave(self, failure: str) -> None:
        """Ends the current stage. `failure`: why the stage failed; empty if it did not fail."""

    def end(self, status: str, request_id: str, num_tokens: int | None) -> None:
        """Ends the trace, because the request has ended. `status`: HTTP status, or a word such as "cancelled".
        `num_tokens`: the prompt's tokens, if known.
        """
