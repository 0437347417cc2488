"""The members file, which lists the workers and models of a running server."""

from __future__ import annotations

import msgspec

from ..errors import ConfigError
from ..ids import Role
from ..units import KIB
from .models import MAX_MODELS, ServedModelConfig
from .routes import Route, require_routes

MAX_MEMBERS = 1024
"""Members of one file: a server keeps a connection with each."""
MAX_MEMBERS_BYTES = 256 * MAX_MEMBERS + 16 * KIB * MAX_MODELS
"""Size of one file: a member's address is a path or a host and port; a model has paths, aliases,
addresses of up to 64 workers per role, and adapters."""


class Member(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One worker.

    Attributes:
      role: prefill or decode.
      address: address of its control socket.
      model: name of its model; empty for the server's first one.
    """

    role: Role
    address: str
    model: str = ""


class Members(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """All workers of a server: one that is not listed is dropped.

    Attributes:
      members: the workers.
      models: the server's models; the first one answers requests without a model name. None for the
        models in the settings.
      routes: versions by public name; each version is one of the models.
    """

    members: tuple[Member, ...]
    models: tuple[ServedModelConfig, ...] | None = None
    routes: dict[str, Route] = {}


def read_members(content: bytes, name: str) -> Members:
    """Parse a members file.

    Args:
      content: the file, as JSON.
      name: name of the file, for errors.

    Raises:
      ConfigError: something in it is wrong; the whole file is rejected.
    """
    try:
        found = msgspec.json.decode(content, type=Members)
    except (msgspec.DecodeError, UnicodeDecodeError, ConfigError) as error:
        raise ConfigError(f"{name} is not a list of members: {error}") from None
    members = found.members
    if len(members) > MAX_MEMBERS:
        raise ConfigError(f"{name} names {len(members)} members; allowed: {MAX_MEMBERS}")
    roles = (Role.PREFILL, Role.DECODE)
    for at, member in enumerate(members):
        if member.role not in roles:
            raise ConfigError(
                f"{name}: members[{at}].role is {member.role.value!r}; allowed: prefill, decode"
            )
    digests = {one.name: one.compute_digest or one.name for one in found.models or ()}
    models: dict[str, list[str]] = {}
    for member in members:
        models.setdefault(member.address, []).append(member.model)
    for address, names in models.items():
        if len({*names}) < len(names) or len({digests.get(one, one) for one in names}) > 1:
            raise ConfigError(
                f"{name} names {address} twice; addresses must differ, unless their models have "
                "one compute digest"
            )
    if found.models is not None:
        _require_models(found.models, name)
    require_routes(found.routes, name)
    return found


def _require_models(models: tuple[ServedModelConfig, ...], name: str) -> None:
    names = [one.name for one in models]
    if not 1 <= len(names) <= MAX_MODELS:
        raise ConfigError(f"{name} names {len(names)} models; allowed: 1 to {MAX_MODELS}")
    for one in names:
        if not one or names.count(one) > 1:
            raise ConfigError(f"{name} names model {one!r} twice, or has an empty name")


def written_members(members: Members) -> bytes:
    """Return the content of a members file."""
    return msgspec.json.format(msgspec.json.encode(members)) + b"\n"
