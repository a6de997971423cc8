"""Reads the answers of the controller's HTTP API."""

from typing import Any

from kvferry_launch.proxy.json_bodies import json_object


class ControllerError(Exception):
    """The controller answered with an error, which the message names, or its answer is not a JSON object."""


def content_of(status: int, body: bytes, has_sent_token: bool) -> dict[str, Any]:
    """Returns the JSON object in the controller's answer. Errors: ControllerError."""
    if status == 401 and has_sent_token:
        raise ControllerError("it refuses the token of the proxy's cluster key (--cluster-key-file), so it has another "
                              "key, or the proxy's key was revoked")
    if status == 401:
        raise ControllerError("it asks for a token, for which the proxy needs a cluster key (--cluster-key-file)")
    content = json_object(body)
    if status == 200 and content is not None:
        return content
    raise ControllerError(str(content.get("error")) if content is not None else
                          f"status {status} with {body[:200]!a}, not with a JSON object")
