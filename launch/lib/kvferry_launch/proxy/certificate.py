"""The certificate with which the proxy serves HTTPS."""

import asyncio
import logging
import ssl
from pathlib import Path

CHECK_EVERY_S = 1.0

logger = logging.getLogger("kvferry.proxy")


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
        return [(found.st_ino, found.st_mtime_ns) for found in (Path(file).stat() for file in self._files)]

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
