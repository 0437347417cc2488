"""HTTP client for one repository of an OCI registry: login, redirects, retries, deadlines, errors;
and reading and writing of manifests. blobs.py transfers blobs with it.
"""

from __future__ import annotations

import base64
import math
import re
import time
from contextlib import contextmanager, suppress
from functools import partial
from threading import Event, local
from typing import TYPE_CHECKING, Any, Final, TypeVar

import httpx2
import msgspec

from triolet.errors import RegistryFailed, said_by
from triolet.loopback import is_loopback
from triolet.plain_text import one_line

from ..manifest import MANIFEST_TYPE, digest_of
from ..reference import DIGEST
from .credentials import PASSWORD, USERNAME

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from .credentials import Credentials
    from .location import Location

Result = TypeVar("Result")
CONNECT_S: Final = 10.0
"""Seconds for a connection with its TLS handshake: a round trip takes well below a second."""
SILENCE_S: Final = 60.0
"""Seconds between two pieces of a request or answer, and for all headers of an answer: registries
on cold object stores take some seconds for the first."""
COMMIT_S: Final = 600.0
"""Seconds for the answer to the end of an upload: some registries then read the whole blob to check
its digest."""
SLOWEST_BYTES_S: Final = 16 << 10
"""A transfer with a lower average rate is given up: at 16 KiB/s no model arrives."""
ATTEMPTS: Final = 4
"""Attempts in a row without progress, for errors where a retry can help."""
PROGRESS_BYTES: Final = 16 << 20
"""After this many new bytes of a blob the count of failures restarts: the connection breaks rarely
enough for the blob to get through."""
FIRST_DELAY_S: Final = 0.5
"""Seconds before the second attempt; doubled for each further one."""
MAX_RETRY_AFTER_S: Final = 30.0
"""Longest wait that a registry may ask for; beyond this the command ends with an error."""
MAX_REDIRECTS: Final = 5
"""Redirects: registries redirect once, to an object store."""
MAX_LOGINS: Final = 2
"""Logins per request: a token for reading does not allow writing, and tokens expire after
minutes."""
MAX_DOCUMENT_BYTES: Final = 4 << 20
"""Size of a manifest or index: the minimum that registries must accept."""
MAX_TOKEN_BYTES: Final = 64 << 10
MAX_COMPLAINT_BYTES: Final = 16 << 10
"""Size of an error's body; proxies send HTML pages."""
MAX_SHOWN: Final = 300
"""Characters of a registry's error message that are shown."""
TRANSIENT: Final = frozenset({408, 429, 500, 502, 503, 504})
INDEX_TYPE: Final = "application/vnd.oci.image.index.v1+json"
_ACCEPTED: Final = ", ".join(
    (
        MANIFEST_TYPE,
        # Lets a registry answer with the type that it has, instead of 404.
        INDEX_TYPE,
        "application/vnd.docker.distribution.manifest.v2+json",
        "application/vnd.docker.distribution.manifest.list.v2+json",
    )
)
_DIGEST_HEADER: Final = "docker-content-digest"
_REMEDIES: Final = {
    404: "check host, repository and tag, and that this user may read it",
    413: "the registry or its proxy refuses a body of this size: raise its limit (nginx: "
    "client_max_body_size)",
}
_PARAMETER: Final = re.compile(r'([a-zA-Z_]+)="([^"]*)"')


class Interrupted(RegistryFailed):
    """A connection failed, or a registry is busy: a retry can help.

    Attributes:
      delay_s: delay that the registry asked for, if any.
    """

    def __init__(self, message: str, delay_s: float | None = None) -> None:
        super().__init__(message)
        self.delay_s = delay_s


class _Token(msgspec.Struct, frozen=True):
    token: str = ""
    access_token: str = ""


class _Complaint(msgspec.Struct, frozen=True):
    code: str = ""
    message: str = ""


class _Complaints(msgspec.Struct, frozen=True):
    errors: tuple[_Complaint, ...] = ()


class _HeadDeadline(local):
    """Bounds the time from the end of a request to the last header of its answer.

    httpx2 bounds only the time between two reads, and h11 reads 100 KiB of headers. `trace` is the
    request extension of that name: it is called in the request's thread, for each new connection
    and at both ends of the wait.
    """

    ends_at_s = math.inf

    def trace(self, event: str, info: Mapping[str, Any]) -> None:
        """Wrap the reads of a new connection; set and remove the deadline of a wait."""
        if event.endswith((".connect_tcp.complete", ".start_tls.complete")):
            stream = info["return_value"]
            stream.read = partial(self._read, stream.read)
        elif event.endswith(".receive_response_headers.started"):
            self.ends_at_s = time.monotonic() + info["request"].extensions["timeout"]["read"]
        elif ".receive_response_headers." in event:
            self.ends_at_s = math.inf

    def _read(self, read: Callable[[int, float], bytes], max_bytes: int, timeout: float) -> bytes:
        left_s = self.ends_at_s - time.monotonic()
        if left_s <= 0:
            raise httpx2.ReadTimeout("timed out")
        return read(max_bytes, min(timeout, left_s))


class Registry:
    """A repository, for several threads at once.

    Args:
      location: location of a manifest in it.
      credentials: user and password; None for anonymous access.
      is_insecure: use HTTP without TLS for a host other than this machine.

    Attributes:
      location: the location.
      is_insecure: whether TLS is not required.
    """

    def __init__(
        self, location: Location, credentials: Credentials | None, *, is_insecure: bool = False
    ) -> None:
        self.location = location
        self.is_insecure = is_insecure
        self._credentials = credentials
        scheme = "http" if is_insecure or location.is_on_loopback else "https"
        self._base = httpx2.URL(f"{scheme}://{location.host}/v2/{location.repository}/")
        self._authorization: str | None = None
        self._is_over = Event()
        self._client = httpx2.Client(
            # Bodies are bytes with a digest and must not be compressed on the way.
            headers={"user-agent": "triolet", "accept-encoding": "identity"},
            # Proxies and certificates in the environment apply only to other machines.
            trust_env=not location.is_on_loopback,
        )
        self._traced = {"trace": _HeadDeadline().trace}

    def __str__(self) -> str:
        return f"{self.location.host}/{self.location.repository}"

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def give_up(self) -> None:
        """End the transfers of all threads, because one of them has failed."""
        self._is_over.set()

    def call(
        self,
        method: str,
        path: str,
        what: str,
        allowed: Collection[int],
        *,
        headers: Mapping[str, str] | None = None,
        content: bytes = b"",
    ) -> tuple[httpx2.Response, bytes]:
        """Send a request with a small body, with retries where they can help; return the answer and
        its whole body.

        Args:
          method: HTTP method.
          path: in the repository, or a whole URL.
          what: subject for errors: `manifest v1`.
          allowed: statuses to return; any other is an error.
          headers: headers of the request.
          content: its body.

        Raises:
          RegistryFailed: it refuses, or cannot be reached.
        """

        def attempt() -> tuple[httpx2.Response, bytes]:
            with self.streaming(
                method, path, what, allowed, headers=headers, content=content
            ) as answer:
                return answer, b"".join(self.pieces(answer, what))

        return self.repeated(attempt)

    def repeated(
        self, attempt: Callable[[], Result], num_bytes: Callable[[], int] = lambda: 0
    ) -> Result:
        """Run an attempt, and repeat it while it is interrupted and a retry can help.

        Args:
          attempt: function that tries a request or a transfer.
          num_bytes: returns the progress of the transfer.

        Raises:
          Interrupted: too many attempts in a row made no progress, or another transfer has failed.
        """
        num_failures = farthest = 0
        while True:
            try:
                return attempt()
            except Interrupted as error:
                num_failures += 1
                if num_bytes() >= farthest + PROGRESS_BYTES:
                    farthest, num_failures = num_bytes(), 1
                delay_s = error.delay_s
                if delay_s is None:
                    delay_s = FIRST_DELAY_S * 2 ** (num_failures - 1)
                if num_failures == ATTEMPTS or self._is_over.wait(delay_s):
                    raise

    @contextmanager
    def streaming(
        self,
        method: str,
        path: str,
        what: str,
        allowed: Collection[int],
        *,
        headers: Mapping[str, str] | None = None,
        content: bytes | Callable[[], Iterator[bytes]] = b"",
        silence_s: float = SILENCE_S,
    ) -> Iterator[httpx2.Response]:
        """Yield the answer to one request before its body is read; log in and follow redirects on
        the way. httpx2 would read the whole bodies of challenges and redirects, however long.

        Args:
          method: HTTP method.
          path: in the repository, or a whole URL.
          what: subject for errors.
          allowed: statuses to return.
          headers: headers of the request, including its length if `content` is a function.
          content: its body, or a function that yields it for each attempt.
          silence_s: for all headers of the answer.

        Raises:
          Interrupted: the connection was lost, here or while the body was read, or the registry
            reports that it is busy.
          RegistryFailed: any other status.
        """
        try:
            url, num_logins = self._base.join(path), 0
            for _ in range(MAX_LOGINS + MAX_REDIRECTS + 1):
                self._require_private(url, what)
                is_own, sent = url.join("/") == self._base.join("/"), self._authorization
                with self._client.stream(
                    method,
                    url,
                    headers={**(headers or {}), **_authorized(sent if is_own else None)},
                    content=content if isinstance(content, bytes) else content(),
                    timeout=httpx2.Timeout(SILENCE_S, connect=CONNECT_S, read=silence_s),
                    extensions=self._traced,
                ) as answer:
                    status = answer.status_code
                    # Some registries answer 403 if a token for reading is used for writing.
                    if status in (401, 403) and is_own and num_logins < MAX_LOGINS:
                        num_logins += 1
                        if self._has_logged_in(answer, sent):
                            continue
                    if answer.has_redirect_location and method in ("GET", "HEAD"):
                        url = answer.url.join(answer.headers["location"])
                        continue
                    if status not in allowed:
                        raise self._refusal(answer, what)
                    yield answer
                    return
        except (httpx2.TransportError, httpx2.InvalidURL) as error:
            raise self._lost(error, what) from None
        raise RegistryFailed(f"{self}: {what} is redirected endlessly; tell its operator")

    def pieces(
        self, answer: httpx2.Response, what: str, max_bytes: int = MAX_DOCUMENT_BYTES
    ) -> Iterator[bytes]:
        """Yield an answer's body as it arrives.

        Args:
          answer: with the body.
          what: subject for errors.
          max_bytes: size limit.

        Raises:
          Interrupted: it arrives too slowly.
          RegistryFailed: it is too long, or another transfer has failed.
        """
        begun_s, num_bytes = time.monotonic(), 0
        # As they arrive: waiting for pieces of a fixed size would delay the check of the time.
        for piece in answer.iter_raw():
            num_bytes += len(piece)
            self.require_pace(begun_s, num_bytes, what)
            if num_bytes > max_bytes:
                raise RegistryFailed(
                    f"{self}: {what} has more than {max_bytes} bytes and was rejected; it was made "
                    "by another program, or the registry is broken"
                )
            yield piece

    def require_pace(self, begun_s: float, num_bytes: int, what: str) -> None:
        """Check that a transfer is fast enough and no other one has failed.

        Raises:
          Interrupted: it is too slow.
          RegistryFailed: another one has failed.
        """
        if self._is_over.is_set():
            raise RegistryFailed(f"{self}: {what} was stopped because another transfer failed")
        if time.monotonic() - begun_s > SILENCE_S + num_bytes / SLOWEST_BYTES_S:
            raise Interrupted(
                f"{self}: {what} is slower than {SLOWEST_BYTES_S >> 10} KiB/s; try again when the "
                "network is better"
            )

    def _require_private(self, url: httpx2.URL, what: str) -> None:
        may_be_plain = self.is_insecure or is_loopback(url.host)
        if url.scheme != "https" and not (url.scheme == "http" and may_be_plain):
            raise RegistryFailed(
                f"{self}: {what} leads to {url.scheme}://{url.host} without TLS and is not "
                "followed; correct the registry's own address, or give --insecure if you trust "
                "every network in between"
            )

    def _has_logged_in(self, answer: httpx2.Response, sent: str | None) -> bool:
        """Log in as a registry's challenge asks; return False if that is not possible."""
        scheme, _, rest = answer.headers.get("www-authenticate", "").partition(" ")
        if scheme.lower() == "bearer":
            self._authorization = self._token(dict(_PARAMETER.findall(rest)))
            return True
        if scheme.lower() != "basic" or self._credentials is None or sent is not None:
            return False
        self._authorization = _basic(self._credentials)
        return True

    def _token(self, challenge: Mapping[str, str]) -> str:
        """Get a token from the server that the registry names."""
        url = self._base.join(challenge.get("realm", ""))
        self._require_private(url, "the login")
        asked = {key: challenge[key] for key in ("service", "scope") if key in challenge}
        basic = None if self._credentials is None else _basic(self._credentials)
        with self._client.stream(
            "GET",
            url.copy_merge_params(asked),
            headers=_authorized(basic),
            timeout=httpx2.Timeout(SILENCE_S, connect=CONNECT_S),
            extensions=self._traced,
        ) as answer:
            if answer.status_code != 200:
                raise self._refusal(answer, f"the login at {url.host}")
            content = b"".join(self.pieces(answer, "the login"))
        try:
            found = msgspec.json.decode(content, type=_Token)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            found = _Token()
        token = found.token or found.access_token
        is_sound = token.isascii() and token.isprintable()  # as headers must be
        if not token or len(content) > MAX_TOKEN_BYTES or not is_sound:
            raise RegistryFailed(f"{self}: {url.host} answers the login with no token; try again")
        return f"Bearer {token}"

    def _lost(self, error: Exception, what: str) -> RegistryFailed:
        """Return the error for a failed connection."""
        reason = self._clean(said_by(error))
        is_refused = isinstance(error, httpx2.ConnectError) and "SSL" in reason
        if is_refused and "EOF" not in reason:
            return RegistryFailed(
                f"{self}: its certificate or TLS is refused: {reason}; set the environment "
                "variable SSL_CERT_FILE to its authority's file, or give --insecure for a registry "
                "without TLS"
            )
        return Interrupted(
            f"{self}: the connection for {what} was lost or not made: {reason}; check that the "
            "registry runs and can be reached, and repeat the command: it goes on from there"
        )

    def _refusal(self, answer: httpx2.Response, what: str) -> RegistryFailed:
        """Return the error for a status, with the registry's own message and a remedy."""
        status, said = answer.status_code, self._said(answer)
        text = f"{self}: {what} is refused with status {status}{said}; {self._remedy(status)}"
        if status not in TRANSIENT:
            return RegistryFailed(text)
        wait = answer.headers.get("retry-after", "")
        delay_s = float(wait) if wait.isdecimal() else None
        if delay_s is not None and delay_s > MAX_RETRY_AFTER_S:
            return RegistryFailed(f"{text}, in {delay_s:g} s as it asks")
        return Interrupted(text, delay_s)

    def _remedy(self, status: int) -> str:
        one = self._credentials
        if status in (401, 403) and one is None:
            return (
                f"no credentials were given: set {USERNAME} and {PASSWORD}, give --username NAME "
                f"and the password on standard input, or `docker login {self.location.host}`"
            )
        if status in (401, 403) and one is not None:
            return (
                f"asked as {one.username} with the password from {one.source}: check that both are "
                "right, and that this user may do that in this repository"
            )
        if status in TRANSIENT:
            return "the registry is busy or broken: repeat the command later, it goes on from there"
        return _REMEDIES.get(status, "the registry refuses that: see its log")

    def _said(self, answer: httpx2.Response) -> str:
        found = _Complaints()
        with suppress(
            httpx2.TransportError,
            RegistryFailed,
            msgspec.DecodeError,
            UnicodeDecodeError,
            RecursionError,
        ):
            found = msgspec.json.decode(
                b"".join(self.pieces(answer, "its refusal", MAX_COMPLAINT_BYTES)),
                type=_Complaints,
            )
        said = "; ".join(f"{one.code}: {one.message}" for one in found.errors)
        return f" ({self._clean(said)[:MAX_SHOWN]})" if said else ""

    def _clean(self, text: str) -> str:
        """Return a text as one line, without secrets that it may repeat."""
        secrets = [self._authorization and self._authorization.partition(" ")[2]]
        if self._credentials is not None:
            secrets += [self._credentials.password]
        for secret in filter(None, secrets):
            text = text.replace(secret, "***")
        return one_line(text)


def find_manifest(
    registry: Registry, reference: str, allowed: Collection[int] = (200, 404)
) -> bytes:
    """Return the bytes of a manifest; empty if there is none.

    Args:
      registry: registry to look in.
      reference: its tag or digest.
      allowed: statuses that are not errors.

    Raises:
      RegistryFailed: it is refused, or has another digest.
    """
    what, path = f"manifest {reference}", f"manifests/{reference}"
    answer, content = registry.call("GET", path, what, allowed, headers={"accept": _ACCEPTED})
    if answer.status_code != 200:
        return b""
    found = digest_of(content)
    named = reference if DIGEST.fullmatch(reference) else found
    for expected in (named, answer.headers.get(_DIGEST_HEADER, found)):
        if expected != found:
            raise RegistryFailed(
                f"{registry}: what it sends as {what} has the digest {found}, expected {expected}; "
                "it was rejected: have the registry's operator check it"
            )
    return content


def put_manifest(
    registry: Registry, reference: str, content: bytes, media_type: str = MANIFEST_TYPE
) -> bool:
    """Write a manifest; return whether the registry lists it at its subject by itself.

    Raises:
      RegistryFailed: it is refused, or stored under another digest.
    """
    what, path = f"manifest {reference}", f"manifests/{reference}"
    headers = {"content-type": media_type}
    answer, _ = registry.call("PUT", path, what, {201}, headers=headers, content=content)
    digest = digest_of(content)
    kept = answer.headers.get(_DIGEST_HEADER, digest)
    if kept != digest:
        raise RegistryFailed(
            f"{registry}: it has kept {what} as {kept}, expected {digest}; it changes manifests "
            "and cannot keep versions: push to another registry"
        )
    return "oci-subject" in answer.headers


def _basic(one: Credentials) -> str:
    return f"Basic {base64.b64encode(f'{one.username}:{one.password}'.encode()).decode()}"


def _authorized(value: str | None) -> dict[str, str]:
    return {} if value is None else {"authorization": value}
