"""Tests of which source of workers a server uses (settings, file, DNS or Redis), and of the metric
that shows how old its last answer is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from server.membership.dns_source import DnsSource
from server.membership.members import MemberFile, member_source
from server.membership.redis_source import RedisSource
from server.metrics.metrics import Metrics
from tests.server.scheduling.fakes import server_config
from triolet.config import ServedModelConfig, ServerConfig
from triolet.config.membership import DnsConfig, MembershipConfig, RedisMembersConfig
from triolet.errors import ConfigError
from triolet.store_health import StoreHealth

if TYPE_CHECKING:
    from trio.testing import MockClock

BY_DNS = MembershipConfig(dns=DnsConfig(decode="d.test:1"))
BY_REDIS = MembershipConfig(redis=RedisMembersConfig(url="redis://h"))
TWO = tuple(ServedModelConfig(name, f"/{name}") for name in ("chat", "code"))


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (ServerConfig(), None),
        (ServerConfig(members_file="/m"), MemberFile),
        (ServerConfig(membership=BY_DNS), DnsSource),
        (ServerConfig(membership=BY_REDIS, models=TWO), RedisSource),
    ],
)
async def test_the_setting_that_is_present_chooses_the_source(
    config: ServerConfig, kind: type | None
) -> None:
    found = member_source(config, set)
    assert kind is None if found is None else type(found) is kind


def test_two_sources_and_dns_for_two_models_are_refused_with_a_remedy() -> None:
    with pytest.raises(ConfigError, match=r"members_file and server\.membership\.redis are set"):
        ServerConfig(members_file="/m", membership=BY_REDIS)
    with pytest.raises(ConfigError, match=r"for 2 models, .*; use membership\.redis"):
        ServerConfig(membership=BY_DNS, models=TWO)


async def test_workers_in_the_settings_count_until_the_store_has_answered(
    autojump_clock: MockClock,
) -> None:
    config = server_config(membership=BY_DNS)
    source = member_source(config, set)
    assert isinstance(source, DnsSource)
    told = [member.address for member in source._table._absent]
    assert told == [*config.prefill_addresses, *config.decode_addresses]


async def test_the_age_of_the_last_answer_is_a_metric_if_there_is_a_store(
    autojump_clock: MockClock,
) -> None:
    metrics = Metrics("model", "none")
    assert b"\ntriolet_membership_age_seconds " not in metrics.exposition()
    metrics.membership = StoreHealth("dns", 0.0)
    metrics.membership.note("it is away", 1.0)
    autojump_clock.jump(7.0)
    assert b"\ntriolet_membership_age_seconds 7.0\n" in metrics.exposition()
