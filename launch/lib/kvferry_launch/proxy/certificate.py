"""The certificate with which the proxy serves HTTPS, and the authorities that it trusts as a client."""

import asyncio
import contextlib
import logging
import ssl
from pathlib import Path

CHECK_EVERY_S = 1.0

logger = logging.getLogger("kvferry.proxy")


def _stamp(file: str) -> tuple[int, int]:
    """Returns what changes when the file is replaced or written. Errors: OSError."""
    found = Path(file).stat()
    return found.st_ino, found.st_mtime_ns


class Certificate:
    """A certificate and its private key, in PEM files. Errors: OSError, of which ssl.SSLError is a subclass, if the
    files can't be read, if they contain no certificate or no key, or if the key is not that of the certificate.
    """

    def __init__(self, certificate_file: str, key_file: str) -> None:
        self._files = (certificate_file, key_file)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_3
        self._times = self._changed_at()
        self._load()

    def _load(self) -> None:
        # With the empty password, a key that is protected by a password is an error. Without any password, OpenSSL
        # would ask for one at the terminal.
        self.context.load_cert_chain(*self._files, password=lambda: b"")

    def _changed_at(self) -> list[tuple[int, int]]:
        return [_stamp(file) for file in self._files]

    async def renew(self) -> None:
        """Looks at the files every CHECK_EVERY_S, and reads them again if they have changed, so that a renewed
        certificate needs no restart of the proxy. Returns only when the task is cancelled.
        """
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            try:
                if (times := self._changed_at()) == self._times:
                    continue
                self._times = times
                # A certificate and a key that do not belong together would make the context unusable, so they are
                # first read into another context.
                Certificate(*self._files)
                self._load()
                logger.info("read the certificate in '%s' again", self._files[0])
            except OSError as error:  # ssl.SSLError is a subclass of OSError
                logger.warning("can't use the certificate '%s' with the key '%s': %s; the former certificate stays in "
                               "use", *self._files, error)


class Authorities:
    """The authorities whose certificates the proxy accepts from the controller and the servers: those in the file that
    the variable SSL_CERT_FILE names, otherwise the system's.
    """

    def __init__(self) -> None:
        self._context: ssl.SSLContext | None = None
        self._seen: tuple[int, int] | None = None

    def context(self) -> ssl.SSLContext:
        """Returns the context for a new connection. Reads the file again if it has changed, so that a new authority
        needs no restart of the proxy; if the new file has no certificate, the former authorities stay trusted.
        """
        seen = None
        if (file := ssl.get_default_verify_paths().cafile) is not None:  # None: there is no such file
            with contextlib.suppress(OSError):  # the file was removed just now
                seen = _stamp(file)
        if self._context is not None and seen in (None, self._seen):
            return self._context
        made = ssl.create_default_context()
        if self._context is None or made.cert_store_stats()["x509"]:
            self._context = made
        else:
            logger.warning("the file '%s' has no certificate of an authority; the former authorities stay trusted",
                           file)
        self._seen = seen
        return self._context
