"""Reads, checks and signs kv_transfer_params, in which a router passes on the addresses of nodes."""

from collections.abc import Callable
from typing import Any

from vllm.logger import init_logger

from kvferry._core import fingerprint_difference
from kvferry.tickets import HANDOFF, PUSH_TARGET, Signer, member_of, signer_of

logger = init_logger(__name__)


class RouterParams:
    """Reads the parameters that a router sends. If this node has a cluster key, only addresses with a valid ticket are
    used. Errors: KeyFileError.
    """

    def __init__(self, cluster_key_file: str) -> None:
        self._signer = _signer(cluster_key_file)
        self.num_refused = 0  # number of addresses without a valid ticket

    def signed(self, params: dict[str, Any]) -> dict[str, Any]:
        """Returns the hand-off's `params`, with a ticket if this node has a key."""
        return params if self._signer is None else self._signer.signed(HANDOFF, params)

    def handoff_source(
        self, request_id: str, params: dict[str, Any], num_tokens: int, identity_of: Callable[[], str]
    ) -> tuple[str, str, int, str] | None:
        """Returns where the prompt's KV is: the prefill node's endpoint, the hand-off's name, the number of tokens, and
        the name of the member that signed this, or "".

        Returns None if the parameters do not say that another node computed the prompt. If they are unusable, the
        endpoint is empty and the name is the reason. `identity_of` returns the fingerprint and weights epoch that both
        nodes must have.
        """
        if not params.get("do_remote_prefill"):
            return None
        refusal = self._refusal(request_id, HANDOFF, params)
        if refusal is not None:
            return "", f"the address in kv_transfer_params came with {refusal}", num_tokens, ""
        identity, theirs = identity_of(), params.get("kvferry_fingerprint")
        if theirs is not None and theirs != identity:
            difference = fingerprint_difference(identity, str(theirs))
            logger.error(
                "kvferry: request %s gets no KV from the prefill node and asks the controller for other nodes, because "
                'the two nodes serve different models ("here" is this node): %s',
                request_id, difference,
            )  # fmt: skip
            return "", f"different models: {difference}", num_tokens, ""
        host, port = params.get("remote_host"), params.get("remote_port")
        count = params.get("remote_num_tokens") or num_tokens
        if (wrong := _why_unusable(host, port, count)) is not None:
            logger.warning(
                "kvferry: request %s gets no KV from the prefill node, because in its kv_transfer_params %s; the "
                "controller is asked for other nodes instead",
                request_id, wrong,
            )  # fmt: skip
            return "", wrong, num_tokens, ""
        handoff = str(params.get("remote_request_id") or "")
        place = f"[{host}]" if ":" in str(host) else host
        member = member_of(params) if self._signer is not None else ""
        return f"tcp://{place}:{port}", handoff, min(count, num_tokens), member

    def push_target(self, request_id: str, params: dict[str, Any]) -> str | None:
        """Returns the endpoint of the decode node that the router chose before the prefill, or None if `params` name no
        usable endpoint.
        """
        target = params.get("kvferry_push_to")
        if target is None:
            return None
        fields = target if isinstance(target, dict) else {"endpoint": target}
        if self._refusal(request_id, PUSH_TARGET, fields) is not None:
            return None
        endpoint = fields.get("endpoint")
        if not isinstance(endpoint, str) or not endpoint.startswith("tcp://"):
            logger.warning(
                "kvferry: request %s: kvferry_push_to is %.200r, not \"tcp://HOST:PORT\" or "
                '{"engine_id": ..., "endpoint": "tcp://HOST:PORT"}; its KV is not pushed',
                request_id, target,
            )  # fmt: skip
            return None
        return endpoint

    def prepares(self, request_id: str, params: dict[str, Any], engine_id: str) -> bool:
        """Returns True if a router says that the request is a preparation for this node: a request with the same prompt
        will follow, when the prefill node has pushed the prompt's KV here.

        `kvferry_prepare` has the fields of that push's target, so that a router signs both in the same way.
        """
        target = params.get("kvferry_prepare")
        if not isinstance(target, dict) or target.get("engine_id") != engine_id:
            return False
        return self._refusal(request_id, PUSH_TARGET, target) is None

    def _refusal(self, request_id: str, names: tuple[str, ...], params: dict[str, Any]) -> str | None:
        """Returns None if the address in `params` has a valid ticket, or if this node has no key; else the reason."""
        refusal = None if self._signer is None else self._signer.refusal(names, params)
        if refusal is None:
            return None
        self.num_refused += 1
        # Logs only the refusals 1, 2, 4, 8 and so on, so that clients can't fill the disk with logs.
        if self.num_refused.bit_count() == 1:
            logger.warning(
                "kvferry: request %s: an address in its kv_transfer_params is ignored, because it came with %s; "
                "routers need the cluster key, and must pass hand-offs on unchanged (%d such addresses so far)",
                request_id[:200], refusal, self.num_refused,
            )  # fmt: skip
        return refusal


def _why_unusable(host: object, port: object, count: object) -> str | None:
    """Returns which of a hand-off's fields can't be used, its value and what is allowed; None if all can be used."""
    if not isinstance(host, str) or not host:
        return f"remote_host is {host!r:.40}, not a host name or address"
    if not isinstance(port, int) or not 0 < port < 65536:
        return f"remote_port is {port!r:.40}, not a number from 1 to 65535"
    if not isinstance(count, int) or not 0 < count < 2**31:
        return f"remote_num_tokens is {count!r:.40}, not a number from 1 to {2**31 - 1}"
    return None


def _signer(key_file: str) -> Signer | None:
    if key_file:
        return signer_of(key_file)
    logger.warning(
        "kvferry: hand-offs are not signed, because cluster_key_file is not set: every HTTP client can name an address "
        "to which this node connects (kvferry keygen FILE makes a key)"
    )
    return None
