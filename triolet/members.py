"""The form of a file of members: which workers a server uses, where that changes while it runs."""

from __future__ import annotations

import msgspec

from .errors import ConfigError
from .ids import Role

MAX_MEMBERS = 1024
"""Of one file: a server keeps a connection with each."""
MAX_MEMBERS_BYTES = 256 * MAX_MEMBERS
"""Of one file: the address of a member is a path or a host and a port."""


class Member(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One worker.

    Attributes:
      role: prefill or decode.
      address: of its control socket.
      model: name of the model that it serves; empty for the server's first one.
    """

    role: Role
    address: str
    model: str = ""


class Members(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of them: a worker that is not named is left."""

    members: tuple[Member, ...]


def read_members(content: bytes, name: str) -> tuple[Member, ...]:
    """Return the members that a file names.

    Args:
      content: of the file, JSON.
      name: of the file, for errors.

    Raises:
      ConfigError: something in it is wrong; nothing of it counts.
    """
    try:
        members = msgspec.json.decode(content, type=Members).members
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name} is no list of members: {error}") from None
    if len(members) > MAX_MEMBERS:
        raise ConfigError(f"{name} names {len(members)} members; allowed: {MAX_MEMBERS}")
    roles = (Role.PREFILL, Role.DECODE)
    for at, member in enumerate(members):
        if member.role not in roles:
            raise ConfigError(
                f"{name}: members[{at}].role is {member.role.value!r}; allowed: prefill, decode"
            )
    addresses: set[str] = set()
    for member in members:
        if member.address in addresses:
            raise ConfigError(f"{name} names {member.address} twice; one address is one worker")
        addresses.add(member.address)
    return members


def written_members(members: tuple[Member, ...]) -> bytes:
    """Return the content of a file of members."""
    return msgspec.json.format(msgspec.json.encode(Members(members))) + b"\n"
