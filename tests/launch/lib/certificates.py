"""Makes certificates for tests of HTTPS, and asks servers that have them."""

import ssl
import subprocess
import urllib.error
import urllib.request
from pathlib import Path


def make_certificate(folder: Path, name: str = "tls", *hosts: str) -> tuple[Path, Path]:
    """Makes a certificate for 127.0.0.1 and the names `hosts`, which is its own authority. Returns its file and the one
    of its key.
    """
    certificate, key = folder / f"{name}.crt", folder / f"{name}.key"
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
                    "-days", "2", "-subj", "/CN=127.0.0.1", "-addext",
                    ",".join(["subjectAltName=IP:127.0.0.1", *(f"DNS:{host}" for host in hosts)]), "-keyout", key,
                    "-out", certificate], check=True, capture_output=True)
    return certificate, key


def lock(key: Path, locked: Path) -> Path:
    """Writes the private key with a password into the file `locked`."""
    subprocess.run(["openssl", "ec", "-in", key, "-aes128", "-passout", "pass:secret", "-out", locked], check=True,
                   capture_output=True)
    return locked


def ask(url: str, authority: Path) -> tuple[int, str]:
    """Returns the status and the body of a server's answer. Errors: URLError, also if the server's certificate is not
    of the authority.
    """
    try:
        with urllib.request.urlopen(url, timeout=20.0, context=ssl.create_default_context(cafile=authority)) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refusal:
        return refusal.code, refusal.read().decode()
