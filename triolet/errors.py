"""Every error that Triolet raises itself, with the HTTP status and code of request errors.

Exceptions of libraries are converted in the file that uses the library.
"""

from __future__ import annotations

import re
from typing import Any


class TrioletError(Exception):
    """Base class of all errors that Triolet raises on purpose."""


def said_by(error: BaseException) -> str:
    """Return an error's message for logs. An empty message is replaced by the kind of the error in
    words, such as `read timeout`: class names are for tracebacks."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z]+", type(error).__name__)
    return str(error) or " ".join(words).lower()


class ConfigError(TrioletError):
    """A setting is invalid. The message names the field, its value and what is allowed."""


class SettingError(ConfigError, ValueError):
    """A field of a config type has an invalid value. A ValueError, so that msgspec adds the path to
    the object."""


class ModelError(ConfigError):
    """A model directory is missing, broken or of an unsupported kind."""


class AuditLogError(TrioletError):
    """The audit log cannot be written or is damaged. The message says what to do."""


class StoreError(ConfigError):
    """The model store cannot do what was asked. The message names the file and the remedy."""


class RegistryFailed(TrioletError):
    """A registry refused, lied or was lost. The message says which one, what, and what to do."""


class ProtocolError(TrioletError):
    """A frame that the protocol does not allow."""


class LocalProtocolError(ProtocolError):
    """We were about to break the protocol: a bug on our side."""


class RemoteProtocolError(ProtocolError):
    """The peer broke the protocol."""


class CapacityError(TrioletError):
    """No free blocks, no room in a queue, no live peer. Handled inside, never shown to clients."""


class LeaseError(TrioletError):
    """The caller does not own the block or attempt."""


class DeviceWedged(TrioletError):
    """A device step did not return in time. Its thread still writes the pool: exit the process."""


class RequestError(TrioletError):
    """A request that ends in an error reported to the client.

    Attributes:
      status: HTTP status.
      code: stable word for programs, such as `context_length_exceeded`.
      param: the request field at fault, or None.
      retry_after_s: seconds after which a retry makes sense, or None.
      is_spread: the retry time already differs between clients; add no jitter.
      is_crowded_out: refused only because other requests take the room. Retries are welcome:
        nothing is wrong with the request or the server.
      is_of_queue: refused by the queue, which has counted it by its code.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int,
        code: str,
        param: str | None = None,
        retry_after_s: float | None = None,
        is_spread: bool = False,
        is_crowded_out: bool = False,
        is_of_queue: bool = False,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.is_spread = is_spread
        self.is_crowded_out = is_crowded_out
        self.is_of_queue = is_of_queue

    @property
    def told(self) -> str:
        """The message, prefixed with the field at fault unless it already names it."""
        param = self.param
        if not param or re.search(rf"(?<!\w){re.escape(param)}(?!\w)", self.message):
            return self.message
        return f"{param}: {self.message}"

    @property
    def said(self) -> dict[str, Any]:
        """The constructor's arguments: `RequestError(**said)` makes an equal error without a
        traceback."""
        return {
            "message": self.message,
            "status": self.status,
            "code": self.code,
            "param": self.param,
            "retry_after_s": self.retry_after_s,
            "is_spread": self.is_spread,
            "is_crowded_out": self.is_crowded_out,
            "is_of_queue": self.is_of_queue,
        }


def invalid_request(
    message: str, param: str | None = None, code: str = "invalid_request_error"
) -> RequestError:
    """Return the error for input that is always invalid: 400, no retry."""
    return RequestError(message, status=400, code=code, param=param)


def overloaded(message: str, retry_after_s: float) -> RequestError:
    """Return the error for more load than this process can take: 503, retry later."""
    return RequestError(message, status=503, code="overloaded", retry_after_s=retry_after_s)


def too_many_waiting(message: str, retry_after_s: float) -> RequestError:
    """Return the error for a client at its limit of requests under way: 429, retry later."""
    return RequestError(
        message, status=429, code="rate_limit_exceeded", retry_after_s=retry_after_s
    )


def crowded_out(message: str, retry_after_s: float, *, is_spread: bool = False) -> RequestError:
    """Return the same error for a request that is refused only because others wait or run
    already."""
    return RequestError(
        message,
        status=503,
        code="overloaded",
        retry_after_s=retry_after_s,
        is_spread=is_spread,
        is_crowded_out=True,
    )


def no_worker(message: str, retry_after_s: float = 2.0) -> RequestError:
    """Return the error for a request that no live worker can take or finish: 503."""
    return RequestError(message, status=503, code="no_worker", retry_after_s=retry_after_s)


def draining() -> RequestError:
    """Return the error for a request during this server's shutdown: 503."""
    return RequestError(
        "this server is shutting down; send the request again to reach another one",
        status=503,
        code="draining",
        retry_after_s=1.0,
    )


def model_removed(name: str) -> RequestError:
    """Return the error for a request if its model was removed in the meantime: 404."""
    return RequestError(
        f"model {name} was removed from this server; GET /v1/models lists the available models",
        status=404,
        code="model_not_found",
        param="model",
    )


def deadline_exceeded(message: str) -> RequestError:
    """Return the error for a request after its deadline: 504."""
    return RequestError(message, status=504, code="deadline_exceeded")


def server_error() -> RequestError:
    """Return the error for a bug on our side: 500, without internals in the message."""
    return RequestError(
        "the server failed on this request; look for the request id in the server's log",
        status=500,
        code="server_error",
    )
