"""Blobs on their way to and from a registry: in pieces, checked, continued where they broke off."""

from __future__ import annotations

import hashlib
import io
import os
import re
import time
from threading import Lock
from typing import IO, TYPE_CHECKING, Final

from triolet.errors import RegistryFailed

from ..layout import explained
from .client import (
    ATTEMPTS,
    COMMIT_S,
    PIECE_BYTES,
    Interrupted,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import httpx2

    from ..manifest import Descriptor
    from .client import Registry

CHUNK_BYTES: Final = 32 << 20
"""Of an upload's request: what a lost connection costs at most. Read in pieces, so that it takes
no memory."""
MIN_CHUNK_BYTES: Final = 1 << 20
"""Chunks are halved down to this where a proxy takes no large bodies: its usual limit."""
MAX_CHUNK_BYTES: Final = 1 << 30
"""Of a least size that a registry may ask for; object stores behind them ask for some MiB."""
PROGRESS_BYTES: Final = 16 << 20
"""An attempt that brought so much does not count as failed: the way is slow to lose, not broken."""
_NUMBER: Final = r"[0-9]{1,18}"
"""Of bytes. Python reads no number of thousands of digits."""
_RANGE: Final = re.compile(rf"bytes ({_NUMBER})-({_NUMBER})/({_NUMBER}|\*)")
_RECEIVED: Final = re.compile(rf"(?:bytes=)?0-({_NUMBER})")


class Progress:
    """How many bytes of all blobs are where they shall be; told by several threads.

    Args:
      on_bytes: told the sum after each piece.
    """

    def __init__(self, on_bytes: Callable[[int], None]) -> None:
        self._on_bytes = on_bytes
        self._done: dict[str, int] = {}
        self._lock = Lock()

    def at(self, digest: str, num_bytes: int) -> None:
        """Take notice of how much of a blob is there; it may be less than before."""
        with self._lock:
            self._done[digest] = num_bytes
            self._on_bytes(sum(self._done.values()))


def has_blob(registry: Registry, blob: Descriptor) -> bool:
    """Return whether a registry has a blob.

    Raises:
      RegistryFailed: it does not say, or has one of another size under the digest.
    """
    found = registry.call("HEAD", f"blobs/{blob.digest}", _name(blob), {200, 404})
    length = found.headers.get("content-length")
    if found.status == 200 and length is not None and length != str(blob.size):
        raise RegistryFailed(
            f"{registry}: {_name(blob)} has {length} bytes there, expected {blob.size}; the "
            "registry's copy is damaged: have its operator remove it, then push again"
        )
    return found.status == 200


def download(registry: Registry, file: IO[bytes], blob: Descriptor, progress: Progress) -> int:
    """Bring a blob into a file, from where an earlier pull broke off; return the bytes that came
    over the network.

    Raises:
      RegistryFailed: it cannot be had, or is not what its digest says. What came stays for the
        next pull, unless it is wrong.
      OSError: it cannot be written.
    """
    one = _Download(registry, blob, file, progress)
    is_resumed = one.num_bytes > 0
    fetched = one.fill()
    if is_resumed and not one.is_right:
        # What was here before may have been wrong, and not what came now.
        one.begin_anew()
        fetched += one.fill()
    if not one.is_right:
        one.begin_anew()
        raise one.lie(f"has the digest {one.last_digest}")
    os.fsync(file.fileno())
    return fetched


class _Download:
    """A blob's file, and the digest of what is in it."""

    def __init__(
        self, registry: Registry, blob: Descriptor, file: IO[bytes], progress: Progress
    ) -> None:
        self._registry = registry
        self._blob = blob
        self._file = file
        self._progress = progress
        self._digest = hashlib.sha256()
        self.num_bytes = 0
        self.last_digest = ""
        if os.fstat(file.fileno()).st_size > blob.size:
            file.truncate(0)
        while piece := file.read(PIECE_BYTES):
            self._count(piece)

    @property
    def is_right(self) -> bool:
        """Whether the file is the blob."""
        self.last_digest = f"sha256:{self._digest.hexdigest()}"
        return self.last_digest == self._blob.digest and self.num_bytes == self._blob.size

    def begin_anew(self) -> None:
        """Forget what has come."""
        self._file.seek(0)
        self._file.truncate(0)
        self._digest, self.num_bytes = hashlib.sha256(), 0
        self._progress.at(self._blob.digest, 0)

    def fill(self) -> int:
        """Ask for what is missing until it is there; return how many bytes came."""
        fetched = num_failures = 0
        farthest = self.num_bytes
        while self.num_bytes < self._blob.size:
            before = self.num_bytes
            try:
                fetched += self._attempt()
            except Interrupted as error:
                has_come = self.num_bytes - before
                num_failures += 1
                if self.num_bytes >= farthest + PROGRESS_BYTES:
                    farthest, num_failures = self.num_bytes, 1
                if num_failures == ATTEMPTS:
                    raise Interrupted(
                        f"{error}; {self.num_bytes} of {self._blob.size} bytes of "
                        f"{_name(self._blob)} are kept"
                    ) from None
                fetched += max(0, has_come)
                self._registry.wait_after(error, num_failures - 1)
        return fetched

    def lie(self, what: str) -> RegistryFailed:
        """Return the error of a registry that sends something else."""
        return RegistryFailed(
            f"{self._registry}: what it sends as {_name(self._blob)} {what}, expected "
            f"{self._blob.digest} of {self._blob.size} bytes; it is not used: have the "
            "registry's operator look at it, or pull from another one"
        )

    def _attempt(self) -> int:
        blob, begin = self._blob, self.num_bytes
        headers = {"range": f"bytes={begin}-"} if begin else {}
        name = _name(blob)
        with self._registry.streaming(
            "GET", f"blobs/{blob.digest}", name, {200, 206, 416}, headers=headers
        ) as answer:
            if answer.status_code == 416:
                raise self.lie(f"ends before byte {begin}")
            if answer.status_code == 200 and begin:
                self.begin_anew()  # it sends all, whatever it was asked for
            elif begin:
                self._require_range(answer, begin)
            fetched = 0
            for piece in self._registry.pieces(answer, name):
                if self.num_bytes + len(piece) > blob.size:
                    self.begin_anew()
                    raise self.lie("is longer")
                left = memoryview(piece)
                while left:
                    left = left[self._file.write(left) :]
                self._count(piece)
                fetched += len(piece)
        if self.num_bytes < blob.size:
            raise Interrupted(
                f"{self._registry}: {name} ended after {self.num_bytes} of {blob.size} bytes; "
                "repeat the command: it goes on from there"
            )
        return fetched

    def _require_range(self, answer: httpx2.Response, begin: int) -> None:
        said = answer.headers.get("content-range", "")
        found = _RANGE.fullmatch(said)
        if found is None or int(found[1]) != begin or found[3] not in ("*", str(self._blob.size)):
            raise self.lie(f"is the range {said!r} where bytes {begin}- were asked for,")

    def _count(self, piece: bytes) -> None:
        self._digest.update(piece)
        self.num_bytes += len(piece)
        self._progress.at(self._blob.digest, self.num_bytes)


def upload(registry: Registry, blob: Descriptor, path: Path, progress: Progress) -> None:
    """Send a blob that a registry does not have.

    Args:
      registry: that is to have it.
      blob: its digest and size.
      path: of its file.
      progress: of all blobs.

    Raises:
      RegistryFailed: it is refused, or the connection was lost too often.
      StoreError: the file cannot be read.
    """
    with explained(path), path.open("rb", buffering=0) as file:
        _Upload(registry, blob, file, progress).send()


def upload_bytes(registry: Registry, blob: Descriptor, content: bytes) -> None:
    """Send a small blob that a registry does not have.

    Raises:
      RegistryFailed: it is refused, or the connection was lost too often.
    """
    _Upload(registry, blob, io.BytesIO(content), Progress(lambda _: None)).send()


class _Upload:
    """A blob on its way to a registry."""

    def __init__(
        self, registry: Registry, blob: Descriptor, file: IO[bytes], progress: Progress
    ) -> None:
        self._registry = registry
        self._blob = blob
        self._file = file
        self._progress = progress
        self._where = ""
        self._num_sent = 0
        self._chunk_bytes = CHUNK_BYTES

    def send(self) -> None:
        """Send all of it.

        Raises:
          RegistryFailed: as of `upload`.
        """
        self._begin()
        num_failures = farthest = 0
        while self._num_sent < self._blob.size:
            try:
                self._send_chunk()
            except Interrupted as error:
                num_failures += 1
                if num_failures == ATTEMPTS:
                    raise
                self._registry.wait_after(error, num_failures - 1)
                self._ask_where_it_is()
            if self._num_sent >= farthest + PROGRESS_BYTES:
                farthest, num_failures = self._num_sent, 0
        self._commit()

    def _begin(self) -> None:
        answer = self._registry.call("POST", "blobs/uploads/", f"upload of {self._name}", {202})
        least = answer.headers.get("oci-chunk-min-length", "")
        if re.fullmatch(_NUMBER, least):
            self._chunk_bytes = min(max(self._chunk_bytes, int(least)), MAX_CHUNK_BYTES)
        self._num_sent = 0
        self._go_on_at(answer.location)

    def _send_chunk(self) -> None:
        begin = self._num_sent
        end = min(begin + self._chunk_bytes, self._blob.size)
        headers = {
            "content-type": "application/octet-stream",
            "content-range": f"{begin}-{end - 1}",
            "content-length": str(end - begin),
        }
        with self._registry.streaming(
            "PATCH",
            self._where,
            f"upload of {self._name}",
            {202, 204} if self._chunk_bytes <= MIN_CHUNK_BYTES else {202, 204, 413},
            headers=headers,
            content=lambda: self._pieces(begin, end),
        ) as answer:
            if answer.status_code == 413:
                self._chunk_bytes = max(self._chunk_bytes // 2, MIN_CHUNK_BYTES)
                return
            location = answer.headers.get("location")
            if location is not None:
                self._go_on_at(str(answer.url.join(location)))
        self._num_sent = end

    def _pieces(self, begin: int, end: int) -> Iterator[bytes]:
        begun_s, done = time.monotonic(), begin
        self._file.seek(begin)
        while done < end:
            piece = self._file.read(min(PIECE_BYTES, end - done))
            if not piece:
                raise RegistryFailed(
                    f"{self._name} here ends after {done} bytes, expected {self._blob.size}; "
                    "`triolet model verify` says what else is wrong"
                )
            done += len(piece)
            self._registry.require_pace(begun_s, done - begin, f"upload of {self._name}")
            yield piece
            self._progress.at(self._blob.digest, done)

    def _ask_where_it_is(self) -> None:
        """Learn how much of the blob the registry has; begin anew if it has forgotten it."""
        try:
            answer = self._registry.call(
                "GET", self._where, f"upload of {self._name}", {204, 400, 404}
            )
        except Interrupted:
            return  # the next chunk finds it as it is
        if answer.status != 204:
            self._begin()
            return
        found = _RECEIVED.fullmatch(answer.headers.get("range", ""))
        # "0-0" is what some registries say of no byte as well as of one.
        end = 0 if found is None or found[1] == "0" else int(found[1]) + 1
        if end > self._blob.size or not end:
            self._begin()
            return
        self._num_sent = end
        self._go_on_at(answer.location)

    def _commit(self) -> None:
        joint = "&" if "?" in self._where else "?"
        what = f"end of the upload of {self._name}"
        path = f"{self._where}{joint}digest={self._blob.digest}"
        try:
            self._registry.call("PUT", path, what, {201}, silence_s=COMMIT_S)
        except RegistryFailed:
            # An answer that was lost ends the upload all the same.
            if not has_blob(self._registry, self._blob):
                raise

    def _go_on_at(self, location: str | None) -> None:
        if location is not None:
            self._where = location
        if not self._where:
            raise RegistryFailed(
                f"{self._registry}: it does not say where the upload of {self._name} goes; it is "
                "no OCI registry, or a proxy removes the header `location`"
            )

    @property
    def _name(self) -> str:
        return _name(self._blob)


def _name(blob: Descriptor) -> str:
    """Return what a blob is called in errors."""
    return f"{blob.file_name} ({blob.digest[:19]}…)" if blob.file_name else f"blob {blob.digest}"
