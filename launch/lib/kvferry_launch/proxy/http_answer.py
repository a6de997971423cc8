"""Reads the answer of an HTTP/1.1 server from its bytes. No I/O."""

import re

HEAD_MAX = 64 << 10  # longest head of an answer, in bytes; trailers of a chunked body have this limit too
_CHUNK_LINE_MAX = 256
_STATUS_LINE = re.compile(r"HTTP/1\.([01]) ([1-9][0-9]{2})(?: .*)?")
_NUMBER = re.compile(r"[0-9]{1,18}")
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;.*)?")
_NO_BODY = (204, 304)


class AnswerError(ConnectionError):
    """The bytes from the server are not a valid HTTP/1.1 answer; the message says why."""


class Answer:
    """One answer. The caller passes each piece of the server's bytes to feed(), and the end of the connection to
    feed_end().
    """

    def __init__(self, method: str) -> None:
        self.status = 0  # status of the answer; 0: the answer's head is incomplete
        self.headers: dict[str, str] = {}  # headers by their names in lower case
        self.done = False  # True if the whole answer has arrived
        self.can_reuse = True  # False if the connection can't carry another request after this answer
        self.pieces: list[bytes] = []  # bytes of the body that the caller has not taken yet
        self._method = method
        self._raw = b""  # bytes that are not parsed yet, because more of them are needed
        self._left: int | None = 0  # missing bytes of the body or chunk; None: the body ends with the connection
        self._in_chunks = False
        self._line = "size"  # kind of the next line between chunks: "size", "end" of a chunk's bytes or "trailer"
        self._trailer_bytes = 0

    @property
    def content_type(self) -> str:
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    def feed(self, data: bytes) -> None:
        """Takes the next bytes from the server. Errors: AnswerError."""
        if self._raw:
            data, self._raw = self._raw + data, b""
        while not self.status:
            end = data.find(b"\r\n\r\n")
            if end > HEAD_MAX or (end < 0 and len(data) > HEAD_MAX):
                raise AnswerError(f"the head of the server's answer has more than {HEAD_MAX} bytes")
            if end < 0:
                self._raw = data
                return
            self._read_head(data[:end])
            data = data[end + 4 :]
        if self._in_chunks:
            data = self._take_chunks(data)
        elif self._left is None:
            if data:
                self.pieces.append(data)
            return
        else:
            if data and self._left:
                self.pieces.append(data[: self._left])
            taken = min(self._left, len(data))
            self._left -= taken
            self.done = not self._left
            data = data[taken:]
        if data:  # these bytes came after the end of the answer
            self.can_reuse = False

    def feed_end(self) -> None:
        """Takes the end of the connection. Errors: AnswerError if the answer is not complete."""
        self.can_reuse = False
        if self.status and self._left is None:
            self.done = True
        if not self.done:
            raise AnswerError("the server closed the connection before the end of its answer")

    def _read_head(self, head: bytes) -> None:
        first, *lines = head.decode("latin-1").split("\r\n")
        found = _STATUS_LINE.fullmatch(first)
        if found is None:
            raise AnswerError(f"the server's answer begins with {first[:80]!a}, not with HTTP/1.1 and a status")
        headers = self.headers = {}
        for line in lines:
            name, colon, value = line.partition(":")
            if not colon or "\n" in value or "\r" in value or "\0" in value:
                raise AnswerError(f"the server's answer has the malformed header {line[:80]!a}")
            name = name.lower()
            value = value.strip(" \t")
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
        status = int(found[2])
        if status == 101:
            raise AnswerError("the server switched to another protocol, which the proxy has not asked for")
        if status < 200:
            return  # this is an interim answer, and the answer itself follows
        self.status = status
        if found[1] == "0" or "close" in headers.get("connection", "").lower():
            self.can_reuse = False
        self._find_end(headers)

    def _find_end(self, headers: dict[str, str]) -> None:
        length, coding = headers.get("content-length"), headers.get("transfer-encoding")
        if length is not None and not _NUMBER.fullmatch(length):
            raise AnswerError(f"the server's answer has the Content-Length {length[:80]!a}, not one number of bytes")
        if self._method == "HEAD" or self.status in _NO_BODY:
            self.done = True
        elif coding is not None:
            if coding.lower() != "chunked":
                raise AnswerError(f"the server's answer has the Transfer-Encoding {coding[:80]!a}, not 'chunked'")
            self._in_chunks = True
            self.can_reuse &= length is None  # with both headers, the answer's end is not certain
        elif length is not None:
            self._left = int(length)
            self.done = not self._left
        else:
            self._left, self.can_reuse = None, False

    def _take_chunks(self, data: bytes) -> bytes:
        """Takes chunks and the lines between them. Returns the bytes after the end of the body."""
        assert self._left is not None
        at = 0
        while not self.done:
            if self._left:
                piece = data[at : at + self._left]
                if not piece:
                    return b""
                self.pieces.append(piece)
                at += len(piece)
                self._left -= len(piece)
                continue
            end = data.find(b"\r\n", at)
            most = HEAD_MAX if self._line == "trailer" else _CHUNK_LINE_MAX
            if (len(data) if end < 0 else end) - at > most:
                raise AnswerError(f"a line between the chunks of the server's answer has more than {most} bytes")
            if end < 0:
                self._raw = data[at:]
                return b""
            self._read_line(data[at:end])
            at = end + 2
        return data[at:]

    def _read_line(self, line: bytes) -> None:
        if self._line == "trailer":
            self.done = not line
            self._trailer_bytes += len(line)
            if self._trailer_bytes > HEAD_MAX:
                raise AnswerError(f"the trailers of the server's answer have more than {HEAD_MAX} bytes")
        elif self._line == "end":
            if line:
                raise AnswerError("a chunk of the server's answer is longer than its size line says")
            self._line = "size"
        else:
            found = _CHUNK_SIZE.fullmatch(line)
            if found is None:
                raise AnswerError(f"a chunk of the server's answer has size {line[:80]!a}, not a hexadecimal number")
            self._left = int(found[1], 16)
            self._line = "end" if self._left else "trailer"
