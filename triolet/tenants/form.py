"""Parse the operator's tenants file: TOML with tenants, plans and prices.

No I/O. An invalid file is rejected as a whole, with an error that names the table, the field and
the allowed values. Errors never show the value of a key field, which may be a secret.
"""

from __future__ import annotations

import difflib
import hmac
import re
import tomllib
from dataclasses import fields
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import msgspec
from msgspec import Meta

from ..config import MAX_RUNGS
from ..config.limits import LabelText
from ..errors import ConfigError
from ..service_class import ANYWHERE, CLASS_OF_NAME, Placement, ServiceClass
from .plans import Plan, Prices, Tenant, TenantKey, TenantRole, Tenants

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    Field: TypeAlias = tuple[Callable[[object], Any], str]
    """A function that parses a value, raising ValueError or ValidationError, and what is
    allowed."""

NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
DIGEST_PREFIX: Final = "sha256:"
DEFAULT_PLAN: Final = "default"
"""Plan of tenants that name none. It may be missing in the file."""
MAX_TENANTS: Final = 10_000
"""This many names may become metric labels."""
MAX_KEYS: Final = 16
"""Keys of one tenant: present ones and those being replaced."""
MAX_LABELS: Final = 64
"""Most pools, or zones, of one plan or tenant."""
MAX_NUMBER: Final = 1e15
"""Above this a float cannot represent every whole number."""
MAX_PRICE: Final = 1_000_000_000
"""Per million tokens: spend is counted in billionths in 63 bits."""
_SECRET: Final = re.compile(r"[0-9a-f]{64}")
_TABLES: Final = ("cache_secret", "plans", "tenants", "prices")


def read_tenants(content: bytes, name: str) -> Tenants:
    """Parse a tenants file.

    Args:
      content: content of the file.
      name: name of the file, for errors.

    Raises:
      ConfigError: something in it is wrong; the whole file is rejected.
    """
    try:
        document = tomllib.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # ValueError: also for a number of 5000 digits
        raise ConfigError(f"{name} is not valid TOML: {error}") from None
    try:
        return _tenants(document)
    except _Wrong as error:
        raise ConfigError(f"{name}: {error}") from None


def is_name(text: str) -> bool:
    """Return whether this is a valid name for a tenant or a plan."""
    return NAME.fullmatch(text) is not None


class _Wrong(Exception):
    """What is wrong with a file."""


def _tenants(document: Mapping[str, Any]) -> Tenants:
    _check_known(document, _TABLES, "at the top")
    secret = document.get("cache_secret")
    if not isinstance(secret, str) or not _SECRET.fullmatch(secret):
        raise _Wrong(
            "cache_secret must be 32 random bytes as 64 digits 0-9a-f; it keeps tenants' caches "
            "apart (`triolet tenant add` writes one)"
        )
    plans = {
        name: Plan(name=name, **_read(table, _PLAN_FIELDS, f"[plans.{name}]"))
        for name, table in _named(document, "plans")
    }
    prices = {
        str(name): Prices(**_read(table, _PRICE_FIELDS, f"[prices.{name}]"))
        for name, table in _table(document, "prices").items()
    }
    plans.setdefault(DEFAULT_PLAN, Plan(DEFAULT_PLAN))
    tenants = [
        _tenant(name, table, plans, bytes.fromhex(secret))
        for name, table in _named(document, "tenants")
    ]
    if not 0 < len(tenants) <= MAX_TENANTS:
        raise _Wrong(
            f"it has {len(tenants)} tenants; allowed: 1 to {MAX_TENANTS} "
            "(`triolet tenant add NAME` makes one)"
        )
    _check_keys_differ(tenants)
    return Tenants(tenants, plans, prices)


def _tenant(name: str, table: object, plans: Mapping[str, Plan], secret: bytes) -> Tenant:
    where = f"[tenants.{name}]"
    found = _read(table, _TENANT_FIELDS, where)
    plan_name = found.pop("plan", DEFAULT_PLAN)
    if plan_name not in plans:
        raise _Wrong(
            f"{where} plan is {plan_name!r}, which is not one of {', '.join(sorted(plans))}"
        )
    plan = plans[plan_name]
    pools = frozenset(found.pop("pools", plan.pools))
    has_overflow = found.pop("overflow", plan.overflow) and bool(pools)
    placement = Placement(frozenset(found.pop("zones", plan.zones)), pools, has_overflow)
    return Tenant(
        name=name,
        plan=plan,
        placement=ANYWHERE if placement == ANYWHERE else placement,
        is_disabled=found.pop("disabled", False),
        secret=hmac.digest(secret, name.encode(), "sha256"),
        **found,
    )


def _check_keys_differ(tenants: Iterable[Tenant]) -> None:
    owners: dict[str, str] = {}
    for tenant in tenants:
        for key in tenant.keys:
            other = owners.setdefault(key.digest, tenant.name)
            if other != tenant.name:
                raise _Wrong(f"[tenants.{tenant.name}] has the same key as [tenants.{other}]")


def _named(document: Mapping[str, Any], table: str) -> Iterable[tuple[str, object]]:
    found = _table(document, table)
    for name in found:
        if not is_name(name):
            raise _Wrong(
                f"[{table}] has {name[:80]!r}; allowed as a name: 1 to 64 letters, digits, dots, "
                "- and _"
            )
    return found.items()


def _table(document: Mapping[str, Any], name: str) -> Mapping[str, object]:
    table = document.get(name, {})
    if not isinstance(table, dict):
        raise _Wrong(f"{name} is not a table; write [{name}.NAME]")
    return table


def _read(table: object, known: Mapping[str, Field], where: str) -> dict[str, Any]:
    """Parse the fields of a table that are present."""
    if not isinstance(table, dict):
        raise _Wrong(f"{where} is not a table")
    _check_known(table, known, f"in {where}")
    found = {}
    for name, value in table.items():
        reader, allowed = known[name]
        try:
            found[name] = reader(value)
        except (ValueError, msgspec.ValidationError):
            shown = "" if name == "keys" else f" is {_echo(value)!r};"
            raise _Wrong(f"{where} {name}{shown} must be {allowed}") from None
    return found


def _check_known(table: Iterable[str], known: Iterable[str], where: str) -> None:
    words = sorted(known)
    for name in table:
        if name not in words:
            near = difflib.get_close_matches(name, words, 1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(words)}"
            raise _Wrong(f"{where} is {name[:80]!r}, which is unknown; {hint}")


def _echo(value: object) -> str:
    try:
        return str(value)[:80]
    except ValueError:  # thousands of digits
        return "a very large number"


def _typed(kind: object) -> Callable[[object], Any]:
    return partial(msgspec.convert, type=kind)


class _KeyTable(msgspec.Struct, forbid_unknown_fields=True):
    """A key with an end time."""

    digest: _Digest
    until: Annotated[datetime, Meta(tz=True)]


def _classes(value: object) -> tuple[ServiceClass, ...]:
    names = msgspec.convert(value, _Words)
    if len(set(names)) != len(names) or not CLASS_OF_NAME.keys() >= set(names):
        raise ValueError
    return tuple(CLASS_OF_NAME[name] for name in names)


def _alerts(value: object) -> tuple[float, ...]:
    return tuple(sorted(set(msgspec.convert(value, list[_Positive]))))


def _keys(value: object) -> tuple[TenantKey, ...]:
    keys = [
        TenantKey(one.digest.removeprefix(DIGEST_PREFIX), one.until.timestamp())
        if isinstance(one, _KeyTable)
        else TenantKey(one.removeprefix(DIGEST_PREFIX))
        for one in msgspec.convert(value, _KeyList, builtin_types=(datetime,))
    ]
    if len({key.digest for key in keys}) != len(keys):
        raise ValueError
    return tuple(keys)


def _ladder(value: object) -> tuple[str, ...]:
    names = tuple(msgspec.convert(value, _Words))
    if len(names) > MAX_RUNGS or len(set(names)) != len(names):
        raise ValueError
    return names


_Positive = Annotated[float, Meta(gt=0, le=MAX_NUMBER)]
_Label = Annotated[LabelText, Meta(min_length=1)]
_Words = Annotated[list[str], Meta(min_length=1)]
_Digest = Annotated[str, Meta(pattern=rf"\A{DIGEST_PREFIX}[0-9a-f]{{64}}\Z")]
_KeyList = Annotated[list[_Digest | _KeyTable], Meta(max_length=MAX_KEYS)]

_SHARE: Final = (_typed(Annotated[float, Meta(gt=0, le=1)]), "a number above 0 and up to 1")
_RATE: Final = (_typed(Annotated[float, Meta(ge=1, le=MAX_NUMBER)]), "a number of at least 1")
_COUNT: Final = (
    _typed(Annotated[int, Meta(ge=1, le=int(MAX_NUMBER))]),
    "a whole number above 0",
)
_AMOUNT: Final = (_typed(Annotated[float, Meta(ge=0, le=MAX_NUMBER)]), "a number of at least 0")
_PRICE: Final = (
    _typed(Annotated[float, Meta(ge=0, le=MAX_PRICE)]),
    f"a number from 0 to {MAX_PRICE:,}",
)
_LABELS: Final = (
    _typed(Annotated[tuple[_Label, ...], Meta(max_length=MAX_LABELS)]),
    f"a list of up to {MAX_LABELS} names of 1 to 63 letters, digits, -, _ and .",
)
_PLACES: Final[Mapping[str, Field]] = {
    "pools": _LABELS,
    "overflow": (_typed(bool), "true or false"),
    "zones": _LABELS,
}
_PLAN_FIELDS: Final[Mapping[str, Field]] = {
    "weight": (_typed(_Positive), "a number above 0"),
    "classes": (
        _classes,
        f"a list of different ones of {', '.join(CLASS_OF_NAME)}, the usual one first",
    ),
    "requests_per_minute": _RATE,
    "tokens_per_minute": _RATE,
    "max_concurrent": _COUNT,
    "max_running": _COUNT,
    "max_context_tokens": _COUNT,
    "max_output_tokens": _COUNT,
    "deadline_s": (_typed(_Positive), "a number of seconds above 0"),
    "kv_share": _SHARE,
    "cache_share": _SHARE,
    "budget": _AMOUNT,
    "budget_alerts": (_alerts, "a list of numbers above 0, shares of the budget"),
    **_PLACES,
}
_PRICE_FIELDS: Final[Mapping[str, Field]] = {one.name: _PRICE for one in fields(Prices)}
_TENANT_FIELDS: Final[Mapping[str, Field]] = {
    "plan": (_typed(str), "the name of a plan"),
    "role": (_typed(TenantRole), f"one of {', '.join(TenantRole)}"),
    "keys": (
        _keys,
        f'a list of up to {MAX_KEYS} different digests "{DIGEST_PREFIX}..." or '
        f'{{ digest = "{DIGEST_PREFIX}...", until = 2030-01-31T12:00:00Z }}; never a key itself',
    ),
    "disabled": (_typed(bool), "true or false"),
    "auto": (_ladder, f"a list of 1 to {MAX_RUNGS} different models, the smallest first"),
    **_PLACES,
}
