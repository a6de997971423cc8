"""Makes certificates for tests of HTTPS."""

import subprocess
from pathlib import Path


def make_certificate(folder: Path, name: str = "tls") -> tuple[Path, Path]:
    """Makes a certificate for 127.0.0.1 that is its own authority. Returns its file and the one of its key."""
    certificate, key = folder / f"{name}.crt", folder / f"{name}.key"
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
                    "-days", "2", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1",
                    "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return certificate, key


def lock(key: Path, locked: Path) -> Path:
    """Writes the private key with a password into the file `locked`."""
    subprocess.run(["openssl", "ec", "-in", key, "-aes128", "-passout", "pass:secret", "-out", locked], check=True,
                   capture_output=True)
    return locked
