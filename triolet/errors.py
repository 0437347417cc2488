"""Every error that Triolet raises itself. Foreign ones are mapped where their library is used.

Knows the HTTP status and code that an error of a request ends in; does not know HTTP.
"""

from __future__ import annotations

import re
from typing import Any


class TrioletError(Exception):
    """Anything that Triolet raises on purpose."""


def said_by(error: BaseException) -> str:
    """Return what an error says, for logs and messages. One that says nothing is called by its kind
    in words, such as `read timeout`: names of classes are for tracebacks."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z]+", type(error).__name__)
    return str(error) or " ".join(words).lower()


class ConfigError(TrioletError):
    """A setting that cannot work. The text names the field, its value and what is allowed."""


class SettingError(ConfigError, ValueError):
    """A field of a config type has a value that it may not have. A ValueError, so that msgspec says
    which object of a document it is in."""


class ModelError(ConfigError):
    """A model directory that is missing, broken or of an unsupported kind."""


class AuditLogError(TrioletError):
    """The log of administrative events takes no entry, or is damaged. The text says what to do."""


class StoreError(ConfigError):
    """The model store cannot do what was asked. The text names the file and the remedy."""


class RegistryFailed(TrioletError):
    """A registry refused, lied or was lost. The text says which, what, and what to do."""


class ProtocolError(TrioletError):
    """A frame that the protocol does not allow."""


class LocalProtocolError(ProtocolError):
    """We were about to break the protocol: a bug of ours."""


class RemoteProtocolError(ProtocolError):
    """The peer broke the protocol."""


class CapacityError(TrioletError):
    """No free blocks, no room in a queue, no live peer. Caught inside, never shown as it is."""


class LeaseError(TrioletError):
    """A block or an attempt that the caller does not own."""


class DeviceWedged(TrioletError):
    """A device step did not return in time. Its thread still writes the pool: leave the process."""


class RequestError(TrioletError):
    """A request that ends in an error its client is told of.

    Attributes:
      status: HTTP status.
      code: stable word for programs, such as `context_length_exceeded`.
      param: the request field at fault, or None.
      retry_after_s: seconds after which a retry makes sense, or None.
      is_spread: clients that are told so come at different times as it is; nothing is to be added.
      is_crowded_out: there was no room for it beside what was here before. It may come again as
        often as it likes: nothing is wrong, with it or with the server.
      is_of_queue: the queue refused it, and has counted it by its code.
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
        """The message, behind the name of the field at fault where it does not hold it."""
        param = self.param
        if not param or re.search(rf"(?<!\w){re.escape(param)}(?!\w)", self.message):
            return self.message
        return f"{param}: {self.message}"

    @property
    def said(self) -> dict[str, Any]:
        """What it was made from: `RequestError(**said)` says the same, and holds nothing."""
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
    """Return the error for input that can never work: 400, no retry."""
    return RequestError(message, status=400, code=code, param=param)


def overloaded(message: str, retry_after_s: float) -> RequestError:
    """Return the error for load beyond what this process can bear: 503, retry later."""
    return RequestError(message, status=503, code="overloaded", retry_after_s=retry_after_s)


def too_many_waiting(message: str, retry_after_s: float) -> RequestError:
    """Return the error for a client that has as much under way as it may: 429, retry later."""
    return RequestError(
        message, status=429, code="rate_limit_exceeded", retry_after_s=retry_after_s
    )


def crowded_out(message: str, retry_after_s: float, *, is_spread: bool = False) -> RequestError:
    """Return the same error for who is refused because of what waits or runs already."""
    return RequestError(
        message,
        status=503,
        code="overloaded",
        retry_after_s=retry_after_s,
        is_spread=is_spread,
        is_crowded_out=True,
    )


def no_worker(message: str, retry_after_s: float = 2.0) -> RequestError:
    """Return the error for a request that no live worker could take or finish: 503."""
    return RequestError(message, status=503, code="no_worker", retry_after_s=retry_after_s)


def draining() -> RequestError:
    """Return the error for a request that arrives while this server shuts down: 503."""
    return RequestError(
        "this server is shutting down; send the request again and another one will take it",
        status=503,
        code="draining",
        retry_after_s=1.0,
    )


def model_removed(name: str) -> RequestError:
    """Return the error for a request whose model was removed meanwhile: 404."""
    return RequestError(
        f"model {name} was removed from this server; GET /v1/models lists those that there are",
        status=404,
        code="model_not_found",
        param="model",
    )


def deadline_exceeded(message: str) -> RequestError:
    """Return the error for a request whose deadline passed: 504."""
    return RequestError(message, status=504, code="deadline_exceeded")


def server_error() -> RequestError:
    """Return the error for a bug of ours: 500, with no internals in the text."""
    return RequestError(
        "the server failed on this request; the request id finds it in the server's log",
        status=500,
        code="server_error",
    )
