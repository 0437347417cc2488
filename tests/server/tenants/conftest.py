"""A Redis server for the tests of a module, emptied for each test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from .redis_server import running_redis

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .redis_server import RedisServer


@pytest.fixture(scope="module")
def module_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with running_redis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def redis(module_redis: RedisServer) -> RedisServer:
    module_redis.command("FLUSHALL")
    return module_redis
