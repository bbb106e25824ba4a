"""Bodies of HTTP responses of other programs: read within a bound, decompressed too, and decoded."""

from __future__ import annotations

import json
import zlib
from typing import TYPE_CHECKING, Any

from rl_rollout.errors import GenerationError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

MOST_BYTES = 2**26
"""Bytes of an answer, or of a line of a stream, that are read: as many as a listener of ours takes."""
_ENCODINGS = {"gzip": 31, "x-gzip": 31, "deflate": 47}
"""Window bits of `zlib`, by content encoding."""


class AnswerBody:
    """Body of an HTTP answer: decompresses it, and refuses more than a number of bytes.

    Sessions of aiohttp that read with it have `auto_decompress=False`: 1.5 MB of gzip may hold 1.5 GB.

    Args:
        encoding: Content encoding of the answer.
        url: Who answers, for errors.
        most_bytes: Bytes in all, after decompression.
        is_stream: Count the bytes of each piece rather than of all.
    """

    def __init__(
        self, encoding: str | None, *, url: str, most_bytes: int = MOST_BYTES, is_stream: bool = False
    ) -> None:
        self._url, self._most, self._left, self._is_stream = url, most_bytes, most_bytes, is_stream
        name = (encoding or "identity").strip().lower()
        if name != "identity" and name not in _ENCODINGS:
            raise GenerationError(f"{url} answered in the encoding {name!r:.40}; identity, gzip and deflate are read")
        self._inflater = None if name == "identity" else zlib.decompressobj(_ENCODINGS[name])

    def feed(self, data: bytes) -> bytes:
        """Decompress the next piece.

        Raises:
            GenerationError: there is too much, or it is damaged; names the URL.
        """
        if self._is_stream:
            self._left = self._most
        if self._inflater is not None:
            try:
                data = self._inflater.decompress(data, self._left + 1)
            except zlib.error as error:
                raise GenerationError(f"{self._url} sent an answer that cannot be decompressed: {error}") from error
        self._left -= len(data)
        if self._left < 0:
            raise GenerationError(f"{self._url} sent more than {self._most} bytes in one answer")
        return data

    def end(self) -> None:
        """Check that a compressed response is complete.

        Raises:
            GenerationError: it has not.
        """
        if self._inflater is not None and not self._inflater.eof:
            raise GenerationError(f"{self._url} sent an answer that cannot be decompressed: it is cut off")


async def read_body(response: Any, *, most_bytes: int = MOST_BYTES) -> bytes:
    """Read the whole body of an aiohttp response.

    Raises:
        GenerationError: see `AnswerBody`.
    """
    body = AnswerBody(response.headers.get("Content-Encoding"), url=str(response.url), most_bytes=most_bytes)
    data = b"".join([body.feed(piece) async for piece in response.content.iter_any()])
    body.end()
    return data


async def read_lines(response: Any) -> AsyncIterator[bytes]:
    """Read the lines of an aiohttp response as they arrive; empty ones are left out.

    Raises:
        GenerationError: see `AnswerBody`; of a single line too.
    """
    body = AnswerBody(response.headers.get("Content-Encoding"), url=str(response.url), is_stream=True)
    rest = b""
    async for piece in response.content.iter_any():
        *lines, rest = (rest + body.feed(piece)).split(b"\n")
        if len(rest) > MOST_BYTES:
            raise GenerationError(f"{response.url} sent more than {MOST_BYTES} bytes in one line")
        for line in lines:
            if line:
                yield line


def json_object(data: bytes, url: str) -> dict[str, Any]:
    """Decode a JSON object.

    Raises:
        GenerationError: it is anything else; names the URL.
    """
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise GenerationError(
            f"{url} answered with no JSON ({error}): {data[:300].decode(errors='replace')}"
        ) from error
    if not isinstance(found, dict):
        raise GenerationError(f"{url} answered with {type(found).__name__}, and not with a JSON object: {found!r:.300}")
    return found
