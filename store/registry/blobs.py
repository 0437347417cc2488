"""Transfer blobs to and from a registry in pieces, with digest checks and resumption."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import IO, TYPE_CHECKING, Final

from triolet.errors import RegistryFailed

from ..layout import explained
from .client import COMMIT_S, Interrupted, Registry

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from pathlib import Path

    from ..manifest import Descriptor

PIECE_BYTES: Final = 1 << 20
"""Largest piece to read, hash and send at once; bounds a transfer's memory."""
MAX_TRANSFERS: Final = 4
"""Concurrent connections: object stores give each about 100 MB/s, and each hashes on one core."""


def for_each(
    registry: Registry, blobs: Collection[Descriptor], action: Callable[[Descriptor], int]
) -> list[int]:
    """Transfer several blobs concurrently, largest first. Stop at the first failure.

    Args:
      registry: its other transfers end when one fails.
      blobs: each once.
      action: called in some thread.

    Returns:
      The results of the action.

    Raises:
      Exception: the first one that the action raised.
    """
    order = sorted(blobs, key=lambda one: -one.size)
    with ThreadPoolExecutor(MAX_TRANSFERS, thread_name_prefix="registry") as threads:
        futures = [threads.submit(action, one) for one in order]
        try:
            for ended in wait(futures, return_when=FIRST_EXCEPTION).done:
                ended.result()  # raises the first failure
            return [one.result() for one in futures]
        except BaseException:
            registry.give_up()
            threads.shutdown(cancel_futures=True)
            raise


def has_blob(registry: Registry, blob: Descriptor) -> bool:
    """Return whether a registry has a blob.

    Raises:
      RegistryFailed: it does not say, or its blob has another size.
    """
    found, _ = registry.call("HEAD", f"blobs/{blob.digest}", _name(blob), {200, 404})
    length = found.headers.get("content-length")
    if found.status_code == 200 and length not in (None, str(blob.size)):
        raise RegistryFailed(
            f"{registry}: {_name(blob)} has {length} bytes there, expected {blob.size}; the "
            "registry's copy is damaged: have its operator remove it, then push again"
        )
    return found.status_code == 200


def download(
    registry: Registry, file: IO[bytes], blob: Descriptor, on_bytes: Callable[[int], None]
) -> int:
    """Download a blob into a file, resuming an earlier pull; return the bytes that came over the
    network.

    Args:
      registry: registry with the blob.
      file: with the bytes that have arrived so far.
      blob: its digest and size.
      on_bytes: called with the number of new bytes; negative if earlier ones were wrong.

    Raises:
      RegistryFailed: it cannot be downloaded, or does not match its digest. Received bytes are kept
        for the next pull, unless they are wrong.
      OSError: it cannot be written.
    """
    one = _Download(registry, blob, file, on_bytes)
    is_resumed = one.num_bytes > 0
    one.fill()
    if is_resumed and not one.is_right:
        # The error may be in the earlier bytes, not in the new ones.
        one.begin_anew()
        one.fill()
    if not one.is_right:
        raise one.lie(f"has the digest {one.digest}")
    os.fsync(file.fileno())
    return one.num_fetched


class _Download:
    """A blob's file, and the digest of its content."""

    def __init__(
        self,
        registry: Registry,
        blob: Descriptor,
        file: IO[bytes],
        on_bytes: Callable[[int], None],
    ) -> None:
        self._registry = registry
        self._blob = blob
        self._file = file
        self._on_bytes = on_bytes
        self._hash = hashlib.sha256()
        self.num_bytes = self.num_fetched = 0
        while piece := file.read(PIECE_BYTES):
            self._count(piece)

    @property
    def digest(self) -> str:
        """Digest of the file's content."""
        return f"sha256:{self._hash.hexdigest()}"

    @property
    def is_right(self) -> bool:
        """Return whether the file is the complete blob."""
        return (self.digest, self.num_bytes) == (self._blob.digest, self._blob.size)

    def begin_anew(self) -> None:
        """Discard all received bytes."""
        self._file.seek(0)
        self._file.truncate(0)
        self._on_bytes(-self.num_bytes)
        self._hash, self.num_bytes = hashlib.sha256(), 0

    def fill(self) -> None:
        """Request missing bytes until the file is complete."""
        try:
            self._registry.repeated(self._attempt, lambda: self.num_bytes)
        except Interrupted as error:
            raise Interrupted(
                f"{error}; {self.num_bytes} of {self._blob.size} bytes of {_name(self._blob)} are "
                "kept"
            ) from None

    def lie(self, what: str) -> RegistryFailed:
        """Discard all received bytes; return the error for a registry that sends something else."""
        self.begin_anew()
        return RegistryFailed(
            f"{self._registry}: what it sends as {_name(self._blob)} {what}, expected "
            f"{self._blob.digest} of {self._blob.size} bytes; it was rejected: have the "
            "registry's operator check it, or pull from another one"
        )

    def _attempt(self) -> None:
        blob, begin, name = self._blob, self.num_bytes, _name(self._blob)
        if begin >= blob.size:
            return
        with self._registry.streaming(
            "GET",
            f"blobs/{blob.digest}",
            name,
            {200, 206, 416},
            headers={"range": f"bytes={begin}-"} if begin else {},
        ) as answer:
            said = answer.headers.get("content-range", "")
            if answer.status_code == 200:
                self.begin_anew()  # it ignores the range and sends everything
            elif not said.startswith(f"bytes {begin}-"):
                raise self.lie(f"is the range {said!r} where bytes {begin}- were asked for,")
            for piece in self._registry.pieces(answer, name, sys.maxsize):
                if self.num_bytes + len(piece) > blob.size:
                    raise self.lie("is longer")
                left = memoryview(piece)
                while left:
                    left = left[self._file.write(left) :]
                self._count(piece)
                self.num_fetched += len(piece)
        if self.num_bytes < blob.size:
            raise Interrupted(
                f"{self._registry}: {name} ended after {self.num_bytes} of {blob.size} bytes; "
                "repeat the command: it goes on from there"
            )

    def _count(self, piece: bytes) -> None:
        self._hash.update(piece)
        self.num_bytes += len(piece)
        self._on_bytes(len(piece))


def upload(
    registry: Registry, blob: Descriptor, path: Path, on_bytes: Callable[[int], None]
) -> None:
    """Upload a blob that a registry does not have.

    Args:
      registry: the target.
      blob: its digest and size.
      path: path of its file.
      on_bytes: called with the number of bytes sent.

    Raises:
      RegistryFailed: it is refused, or the connection was lost too often.
      StoreError: the file cannot be read.
    """

    def pieces() -> Iterator[bytes]:
        begun_s, num_bytes = time.monotonic(), 0
        with explained(path), path.open("rb", buffering=0) as file:
            while piece := file.read(PIECE_BYTES):
                num_bytes += len(piece)
                registry.require_pace(begun_s, num_bytes, f"upload of {_name(blob)}")
                on_bytes(len(piece))
                yield piece

    upload_content(registry, blob, pieces)


def upload_content(
    registry: Registry, blob: Descriptor, content: bytes | Callable[[], Iterator[bytes]]
) -> None:
    """Upload a blob that a registry does not have.

    Args:
      registry: the target.
      blob: its digest and size.
      content: its bytes, or a function that yields them for each attempt.

    Raises:
      RegistryFailed: it is refused, or the connection was lost too often.
    """
    what = f"upload of {_name(blob)}"
    headers = {"content-type": "application/octet-stream", "content-length": str(blob.size)}

    def attempt() -> None:
        with registry.streaming("POST", "blobs/uploads/", what, {202}) as answer:
            location = answer.headers.get("location")
        if not location:
            raise RegistryFailed(
                f"{registry}: it names no place for the {what}; it is not an OCI registry, or a "
                "proxy removes the header `location`"
            )
        joint = "&" if "?" in location else "?"
        path = f"{answer.url.join(location)}{joint}digest={blob.digest}"
        try:
            with registry.streaming(
                "PUT", path, what, {201}, headers=headers, content=content, silence_s=COMMIT_S
            ):
                return
        except RegistryFailed:
            # If only the answer was lost, the upload is complete all the same.
            if not has_blob(registry, blob):
                raise

    registry.repeated(attempt)


def _name(blob: Descriptor) -> str:
    """Return a blob's name for errors."""
    return f"{blob.file_name} ({blob.digest[:19]}…)" if blob.file_name else f"blob {blob.digest}"
