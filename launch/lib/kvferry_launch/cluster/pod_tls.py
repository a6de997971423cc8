"""HTTPS of a deployment's pods on Kubernetes. The deployment's file names Secrets of the type kubernetes.io/tls, as
cert-manager makes them: one with the controller's certificate, one with that of launch/proxy. This module does no I/O.

| file | mounted by |
|---|---|
| tls.crt, tls.key | the pods that serve HTTPS with this certificate |
| ca.crt of the controller's Secret | the pods of launch/proxy, which trust this authority; they never see the key |
"""

from typing import Any

from kvferry_launch.cluster.schema import SpecError

CERTIFICATE_FOLDER, AUTHORITY_FOLDER = "/etc/kvferry-tls", "/etc/kvferry-ca"
CERTIFICATE, KEY, AUTHORITY = "tls.crt", "tls.key", "ca.crt"  # names of the files in a Secret
TRUST_ENV = "SSL_CERT_FILE"  # names the file with the authorities that launch/proxy trusts
CONTROLLER_ENV = ("KVFERRY_HTTP_CERT_FILE", "KVFERRY_HTTP_KEY_FILE")
PROXY_FLAGS = ("--tls-cert-file", "--tls-key-file")
Object = dict[str, Any]


def check(raw: Object) -> None:
    """Checks the keys of the deployment's file that set HTTPS on Kubernetes. A certificate that variables or flags name
    is refused, because probes and the proxy would go on asking by HTTP. Errors: SpecError.
    """
    kind = raw["router"]["kind"]
    if raw["kubernetes"]["router_tls_secret"] and kind != "proxy":
        raise SpecError(f"kubernetes.router_tls_secret is given, but router.kind is {kind}; only proxy takes the "
                        "certificate in a Secret")
    if name := next((name for name in CONTROLLER_ENV if name in raw["env"]), None):
        raise SpecError(f"env.{name} is given, but on kubernetes the certificate is in a Secret, which "
                        "kubernetes.controller_tls_secret names; remove it")
    flags = [str(flag).partition("=")[0] for flag in raw["router"]["flags"]]
    if kind == "proxy" and (flag := next((flag for flag in flags if flag.startswith("--tls-")), None)):
        raise SpecError(f"router.flags has {flag}, but on kubernetes the certificate is in a Secret, which "
                        "kubernetes.router_tls_secret names; remove it")


def certificate_flags(secret: str | None, for_certificate: str, for_key: str) -> list[str]:
    """Returns the flags with which a command serves HTTPS; none without a Secret."""
    if secret is None:
        return []
    return [for_certificate, f"{CERTIFICATE_FOLDER}/{CERTIFICATE}", for_key, f"{CERTIFICATE_FOLDER}/{KEY}"]


def scheme(secret: str | None) -> str:
    return "http" if secret is None else "https"


def serve(pod: Object, secret: str | None) -> None:
    """Gives the container of a pod the Secret with its certificate, and lets the probes use HTTPS. Kubernetes' probes
    check no certificate.
    """
    if secret is None:
        return
    mount(pod, "tls", CERTIFICATE_FOLDER, {"secretName": secret, "defaultMode": 0o400})
    for probe in ("readinessProbe", "livenessProbe"):
        pod["containers"][0][probe]["httpGet"]["scheme"] = "HTTPS"


def trust(pod: Object, secret: str | None) -> None:
    """Lets the container of a pod trust the authority of the certificate in the Secret, unless its environment names
    authorities already.
    """
    one = pod["containers"][0]
    if secret is None or any(variable["name"] == TRUST_ENV for variable in one["env"]):
        return
    mount(pod, "controller-ca", AUTHORITY_FOLDER, {"secretName": secret, "defaultMode": 0o444, "items": [
        {"key": AUTHORITY, "path": AUTHORITY}]})
    one["env"] = [*one["env"], {"name": TRUST_ENV, "value": f"{AUTHORITY_FOLDER}/{AUTHORITY}"}]


def mount(pod: Object, name: str, folder: str, secret: Object) -> None:
    one = pod["containers"][0]
    one["volumeMounts"] = [*one.get("volumeMounts", []), {"name": name, "mountPath": folder, "readOnly": True}]
    pod["volumes"] = [*pod.get("volumes", []), {"name": name, "secret": secret}]
