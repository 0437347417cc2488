"""API keys: who may ask, and as which tenant.

Knows digests, never a key: what the operator's file holds is of no use to whoever reads it, and
finding a digest takes as long for a wrong key as for a right one. Knows headers by value; no
framework, no socket.

A tenant's KV is its own: what clients call their part of the prefix cache is hashed with a secret
of the tenant, so that nobody learns from the time of an answer what another tenant has asked. The
tenant travels with the task that serves a request; so no endpoint can forget it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from triolet.api_keys import KEY_LINE, digest_of
from triolet.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from triolet.errors import TrioletError

SUBPROTOCOL: Final = "triolet"
"""What a browser's WebSocket speaks beside the key: a browser can set no header there, and an
address, with whatever is in it, ends up in logs and histories."""
KEY_SUBPROTOCOL: Final = "triolet-key."
"""Before the key in base64url, in Sec-WebSocket-Protocol."""
MAX_KEY_CHARS: Final = 256


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whose request it is.

    Attributes:
      name: as the operator calls it.
      secret: what its parts of the prefix cache are hashed with.
    """

    name: str
    secret: bytes


_TENANT: Final[ContextVar[Tenant | None]] = ContextVar("tenant", default=None)


def current_tenant() -> Tenant | None:
    """Return whose request the running task serves; None where there are no keys."""
    return _TENANT.get()


def enter_tenant(tenant: Tenant) -> None:
    """Let the running task, and those that it starts, serve a tenant."""
    _TENANT.set(tenant)


class KeyRing:
    """The keys that are let in.

    Args:
      digests: each key's SHA-256 in hexadecimal, and its tenant.
    """

    def __init__(self, digests: Mapping[str, str]) -> None:
        # Every server of a fleet reads the same file, so that they share what a tenant has cached.
        secret = hashlib.sha256("".join(sorted(digests)).encode()).digest()
        self._tenants = {
            digest: Tenant(name, hmac.digest(secret, name.encode(), "sha256"))
            for digest, name in digests.items()
        }

    def tenant_of(self, key: str | None) -> Tenant:
        """Return whose key it is.

        Raises:
          RequestError: 401, the same for no key and for a wrong one.
        """
        if key is None or not 0 < len(key) <= MAX_KEY_CHARS:
            raise _unknown_key()
        digest = digest_of(key)
        # The look-up compares digests, which tell nothing of how near a wrong key was.
        tenant = self._tenants.get(digest)
        found = digest if tenant is not None else "0" * len(digest)
        if not hmac.compare_digest(found, digest) or tenant is None:
            raise _unknown_key()
        return tenant

    def tenant_named(self, name: str) -> Tenant:
        """Return a tenant whose request comes from within.

        Raises:
          RequestError: 401; it has no key any more.
        """
        for tenant in self._tenants.values():
            if tenant.name == name:
                return tenant
        raise _unknown_key()


def read_keys(path: str) -> KeyRing:
    """Return the keys of a file: lines of a tenant and a digest, and comments.

    Raises:
      ConfigError: the file cannot be read, holds no key, or something else than keys.
    """
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the file of API keys cannot be read: {error}") from None
    digests: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = KEY_LINE.fullmatch(line.strip())
        if match is None:
            # The line itself is not repeated: it may be a key that somebody wrote down whole.
            raise _wrong_line(path, number, "is not `TENANT sha256:DIGEST`")
        if digests.setdefault(match["digest"], match["tenant"]) != match["tenant"]:
            raise _wrong_line(path, number, "gives one key to two tenants")
    if not digests:
        raise ConfigError(f"{path} holds no key; `triolet keys issue TENANT` makes one")
    return KeyRing(digests)


def sent_key(
    authorization: str | None, x_api_key: str | None, subprotocols: Iterable[str] = ()
) -> str | None:
    """Return the key that a request carries, None for none.

    Args:
      authorization: the header; OpenAI's clients send `Bearer KEY`.
      x_api_key: the header; Anthropic's clients send the key there.
      subprotocols: what a browser's WebSocket offers.
    """
    if authorization is not None:
        scheme, _, key = authorization.partition(" ")
        return key.strip() if scheme.lower() == "bearer" else None
    if x_api_key is not None:
        return x_api_key.strip()
    for offered in subprotocols:
        if offered.startswith(KEY_SUBPROTOCOL):
            return _decoded(offered.removeprefix(KEY_SUBPROTOCOL))
    return None


def _decoded(text: str) -> str | None:
    try:
        padded = text + "=" * (-len(text) % 4)
        return base64.b64decode(padded, altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return None


def _unknown_key() -> RequestError:
    return RequestError(
        "this server asks for an API key; send it as `Authorization: Bearer KEY`",
        status=401,
        code="invalid_api_key",
    )


def _wrong_line(path: str, number: int, what: str) -> TrioletError:
    return ConfigError(f"{path}, line {number} {what}; `triolet keys issue TENANT` prints a line")
