"""One repository of an OCI registry over HTTP: who asks, how long, how often, and what it refuses.

blobs.py streams over it; httpx2 is touched in these two alone.
"""

from __future__ import annotations

import base64
import re
import time
from contextlib import contextmanager, suppress
from threading import Event, Lock, local
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import httpx2
import msgspec

from triolet.errors import RegistryFailed, said_by
from triolet.loopback import is_loopback
from triolet.plain_text import one_line

from .credentials import PASSWORD, USERNAME

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from .credentials import Credentials
    from .location import Location

CONNECT_S: Final = 10.0
"""For a connection with its TLS handshake: round trips take well below a second each."""
SILENCE_S: Final = 60.0
"""Between two pieces of what is sent or answered, and for all headers of an answer: registries that
read from cold object stores take some seconds for the first."""
COMMIT_S: Final = 600.0
"""For the answer to the end of an upload: some registries then read the whole blob to compare its
digest."""
SLOWEST_BYTES_S: Final = 16 << 10
"""A transfer that is slower than this on the whole is given up: 16 KiB/s bring no model."""
ATTEMPTS: Final = 4
"""Of each request, where trying again can help."""
FIRST_DELAY_S: Final = 0.5
"""Before the second attempt; it doubles."""
MAX_RETRY_AFTER_S: Final = 30.0
"""Of what a registry asks to wait; with more, the command says so and ends."""
MAX_REDIRECTS: Final = 5
"""Registries redirect once, to an object store."""
MAX_LOGINS: Final = 2
"""Of one request: a token for reading does not allow writing, and tokens end after minutes."""
MAX_DOCUMENT_BYTES: Final = 4 << 20
"""Of a manifest or an index: what registries accept at least."""
MAX_TOKEN_BYTES: Final = 64 << 10
MAX_COMPLAINT_BYTES: Final = 16 << 10
"""Of an error's body; proxies send pages of HTML."""
MAX_SHOWN: Final = 300
"""Characters of what a registry says of an error."""
PIECE_BYTES: Final = 1 << 20
"""Read, hashed and sent at once at most: what a transfer holds in memory."""
TRANSIENT: Final = frozenset({408, 429, 500, 502, 503, 504})
_PARAMETER: Final = re.compile(r'([a-zA-Z_]+)="([^"]*)"')


class Interrupted(RegistryFailed):
    """A connection was lost or not made, or a registry is busy: trying again can help.

    Attributes:
      delay_s: that the registry asked for before the next attempt, if it did.
    """

    def __init__(self, message: str, delay_s: float | None = None) -> None:
        super().__init__(message)
        self.delay_s = delay_s


class Answer(NamedTuple):
    """A whole answer.

    Attributes:
      status: of HTTP.
      headers: by their names in lower case.
      content: the body.
      location: where its `location` leads, if it has one.
    """

    status: int
    headers: Mapping[str, str]
    content: bytes
    location: str | None


class _Token(msgspec.Struct, frozen=True):
    token: str = ""
    access_token: str = ""


class _Complaint(msgspec.Struct, frozen=True):
    code: str = ""
    message: str = ""


class _Complaints(msgspec.Struct, frozen=True):
    errors: tuple[_Complaint, ...] = ()


class _Stream(Protocol):
    """A connection of httpx2."""

    read: Callable[[int, float | None], bytes]


class _HeadDeadline:
    """Bounds the time from the end of a request to the last header of its answer.

    httpx2 bounds the time between two reads alone, and h11 reads 100 KiB of headers. `trace` is the
    request's extension of that name: it is called in the thread of the request, with each new
    connection and at both ends of the wait.
    """

    def __init__(self) -> None:
        self._thread = local()

    def trace(self, event: str, info: dict[str, Any]) -> None:
        """Take notice of a step of a request."""
        match event.partition(".")[2]:
            case "connect_tcp.complete" | "start_tls.complete":
                self._bound(info["return_value"])
            case "receive_response_headers.started":
                limit_s = info["request"].extensions["timeout"]["read"]
                self._thread.ends_at = time.monotonic() + limit_s
            case "receive_response_headers.complete" | "receive_response_headers.failed":
                self._thread.ends_at = None

    def _bound(self, stream: _Stream) -> None:
        read = stream.read

        def read_in_time(max_bytes: int, timeout: float | None = None) -> bytes:
            ends_at = getattr(self._thread, "ends_at", None)
            if ends_at is None:
                return read(max_bytes, timeout)
            left_s = ends_at - time.monotonic()
            if left_s <= 0:
                raise httpx2.ReadTimeout("timed out")
            return read(max_bytes, left_s)

        stream.read = read_in_time


class Registry:
    """A repository, for several threads at once.

    Args:
      location: of a manifest in it.
      credentials: who asks; None for anybody.
      is_insecure: speak HTTP without TLS to a host beyond this machine.

    Attributes:
      location: as given.
      is_insecure: as given.
    """

    def __init__(
        self, location: Location, credentials: Credentials | None, *, is_insecure: bool = False
    ) -> None:
        self.location = location
        self._credentials = credentials
        self.is_insecure = is_insecure
        scheme = "http" if is_insecure or location.is_on_loopback else "https"
        self._base = httpx2.URL(f"{scheme}://{location.host}/v2/{location.repository}/")
        self._authorization: str | None = None
        self._login = Lock()
        self._is_over = Event()
        self._client = httpx2.Client(
            timeout=httpx2.Timeout(SILENCE_S, connect=CONNECT_S),
            # Bodies are bytes with a digest: nothing is to be packed on the way.
            headers={"user-agent": "triolet", "accept-encoding": "identity"},
            # Proxies and certificates of the environment are for what is beyond this machine.
            trust_env=not location.is_on_loopback,
        )
        self._traced = {"trace": _HeadDeadline().trace}

    def __str__(self) -> str:
        return f"{self.location.host}/{self.location.repository}"

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def give_up(self) -> None:
        """End the transfers of all threads: one of them has failed."""
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
        silence_s: float = SILENCE_S,
    ) -> Answer:
        """Send a request with a small body, again where that can help; return the whole answer.

        Args:
          method: of HTTP.
          path: in the repository, or a whole address.
          what: it is about, for errors: `manifest v1`.
          allowed: statuses that are answers; any other is an error.
          headers: of the request.
          content: its body.
          silence_s: for all headers of the answer.

        Raises:
          RegistryFailed: it refuses, or cannot be reached.
        """

        def attempt() -> Answer:
            with self.streaming(
                method, path, what, allowed, headers=headers, content=content, silence_s=silence_s
            ) as answer:
                content_of = b"" if method == "HEAD" else self._whole(answer, what)
                location = answer.headers.get("location")
                where = None if location is None else str(answer.url.join(location))
                return Answer(answer.status_code, answer.headers, content_of, where)

        for number in range(ATTEMPTS - 1):
            try:
                return attempt()
            except Interrupted as error:
                self.wait_after(error, number)
        return attempt()

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
        """Give the answer to one request, its body not read; log in and be redirected on the way.

        Args:
          method: of HTTP.
          path: in the repository, or a whole address.
          what: it is about, for errors.
          allowed: statuses that are answers.
          headers: of the request; with its length where the content is called for.
          content: its body, or what yields it anew for each attempt.
          silence_s: for all headers of the answer.

        Raises:
          Interrupted: the connection was lost, here or while the body was read, or a registry that
            is busy says so.
          RegistryFailed: any other status.
        """
        timeout = httpx2.Timeout(silence_s, connect=CONNECT_S)
        url, num_logins = self._base.join(path), 0
        with self._mapped(what):
            for _ in range(MAX_LOGINS + MAX_REDIRECTS + 1):
                self._require_private(url, what)
                is_own, sent = self._is_own(url), self._authorization
                with self._client.stream(
                    method,
                    url,
                    headers={**(headers or {}), **_authorized(sent if is_own else None)},
                    content=content if isinstance(content, bytes) else content(),
                    timeout=timeout,
                    extensions=self._traced,
                ) as answer:
                    status = answer.status_code
                    # Some registries say 403 where a token for reading is shown to write.
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
        raise RegistryFailed(f"{self}: {what} is redirected for ever; tell its operator")

    def pieces(self, answer: httpx2.Response, what: str) -> Iterator[bytes]:
        """Yield an answer's body as it comes.

        Raises:
          Interrupted: it comes too slowly, or another transfer has failed.
        """
        begun_s, num_bytes = time.monotonic(), 0
        # As they come: to wait for pieces of one size would be to wait without a look at the clock.
        for piece in answer.iter_raw():
            num_bytes += len(piece)
            self.require_pace(begun_s, num_bytes, what)
            yield piece

    def require_pace(self, begun_s: float, num_bytes: int, what: str) -> None:
        """Go on only if a transfer is fast enough, and no other one has failed.

        Raises:
          Interrupted: it is too slow.
          RegistryFailed: another one has failed.
        """
        if self._is_over.is_set():
            raise RegistryFailed(f"{self}: {what} was ended with another transfer")
        if time.monotonic() - begun_s > SILENCE_S + num_bytes / SLOWEST_BYTES_S:
            raise Interrupted(
                f"{self}: {what} is slower than {SLOWEST_BYTES_S >> 10} KiB/s; try again when the "
                "network is better"
            )

    def wait_after(self, error: Interrupted, number: int) -> None:
        """Wait before the next attempt.

        Raises:
          RegistryFailed: another transfer has failed meanwhile.
        """
        delay_s = FIRST_DELAY_S * 2**number if error.delay_s is None else error.delay_s
        if self._is_over.wait(delay_s):
            raise error

    def _whole(self, answer: httpx2.Response, what: str) -> bytes:
        content = bytearray()
        for piece in self.pieces(answer, what):
            content += piece
            if len(content) > MAX_DOCUMENT_BYTES:
                raise RegistryFailed(
                    f"{self}: {what} has more than {MAX_DOCUMENT_BYTES} bytes and is not read; it "
                    "was made by another program, or the registry is broken"
                )
        return bytes(content)

    def _is_own(self, url: httpx2.URL) -> bool:
        """Whether credentials may be sent there."""
        return (url.scheme, url.host, url.port) == (
            self._base.scheme,
            self._base.host,
            self._base.port,
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
        """Do as a registry's challenge says; False if there is nothing to say."""
        challenge = answer.headers.get("www-authenticate", "")
        scheme, _, rest = challenge.partition(" ")
        with self._login:
            if self._authorization != sent:
                return True  # another thread has
            if scheme.lower() == "basic":
                if self._credentials is None or sent is not None:
                    return False
                self._authorization = _basic(self._credentials)
                return True
            if scheme.lower() != "bearer":
                return False
            self._authorization = self._token(dict(_PARAMETER.findall(rest)))
            return True

    def _token(self, challenge: Mapping[str, str]) -> str:
        """Get a token from where the registry says."""
        what = "the login"
        url = self._base.join(challenge.get("realm", ""))
        self._require_private(url, what)
        asked = {key: challenge[key] for key in ("service", "scope") if key in challenge}
        basic = None if self._credentials is None else _basic(self._credentials)
        with self._client.stream(
            "GET",
            url.copy_merge_params(asked),
            headers=_authorized(basic),
            extensions=self._traced,
        ) as answer:
            if answer.status_code != 200:
                raise self._refusal(answer, f"{what} at {url.host}")
            content = self._whole(answer, what)
        try:
            found = msgspec.json.decode(content, type=_Token)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            found = _Token()
        token = found.token or found.access_token
        is_sound = token.isascii() and token.isprintable()  # as headers must be
        if not token or len(content) > MAX_TOKEN_BYTES or not is_sound:
            raise RegistryFailed(f"{self}: {url.host} answers {what} with no token; try again")
        return f"Bearer {token}"

    @contextmanager
    def _mapped(self, what: str) -> Iterator[None]:
        try:
            yield
        except (httpx2.TransportError, httpx2.InvalidURL) as error:
            reason = self._clean(said_by(error))
            is_refused = isinstance(error, httpx2.ConnectError) and "SSL" in reason
            if is_refused and "EOF" not in reason:
                raise RegistryFailed(
                    f"{self}: its certificate or TLS is refused: {reason}; name its authority's "
                    "file in the environment variable SSL_CERT_FILE, or give --insecure for a "
                    "registry that speaks no TLS"
                ) from None
            raise Interrupted(
                f"{self}: the connection for {what} was lost or not made: {reason}; see that the "
                "registry runs and can be reached, and repeat the command: it goes on from there"
            ) from None

    def _refusal(self, answer: httpx2.Response, what: str) -> RegistryFailed:
        """Return the error of a status, in the registry's words and with what to do."""
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
        if status in (401, 403):
            if self._credentials is None:
                return (
                    f"no credentials were given: set {USERNAME} and {PASSWORD}, give --username "
                    f"NAME and the password on standard input, or `docker login "
                    f"{self.location.host}`"
                )
            one = self._credentials
            return (
                f"asked as {one.username} with the password from {one.source}: see that both are "
                "right, and that this user may do that in this repository"
            )
        if status == 404:
            return "see that host, repository and tag are right, and that this user may read it"
        if status == 413:
            return (
                "the registry or a proxy before it takes no body of this size: raise its limit "
                "(nginx: client_max_body_size)"
            )
        if status in TRANSIENT:
            return "the registry is busy or broken: repeat the command later, it goes on from there"
        return "the registry does not take that: its log says why"

    def _said(self, answer: httpx2.Response) -> str:
        content = bytearray()
        with suppress(httpx2.TransportError, RegistryFailed):
            for piece in self.pieces(answer, "its refusal"):
                content += piece
                if len(content) >= MAX_COMPLAINT_BYTES:
                    break
        try:
            found = msgspec.json.decode(bytes(content), type=_Complaints).errors
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            found = ()
        said = "; ".join(f"{one.code}: {one.message}" for one in found)
        return f" ({self._clean(said)[:MAX_SHOWN]})" if said else ""

    def _clean(self, text: str) -> str:
        """Return one line of a text, without secrets that it may repeat."""
        secrets = [self._authorization and self._authorization.partition(" ")[2]]
        if self._credentials is not None:
            secrets += [self._credentials.password]
        for secret in filter(None, secrets):
            text = text.replace(secret, "***")
        return one_line(text)


def _basic(one: Credentials) -> str:
    return f"Basic {base64.b64encode(f'{one.username}:{one.password}'.encode()).decode()}"


def _authorized(value: str | None) -> dict[str, str]:
    return {} if value is None else {"authorization": value}
