"""Fixture with a real Redis server, emptied before each test, and a helper to find leases in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from server.peers.answer_directory import PREFIX
from tests.server.tenants.conftest import module_redis as module_redis
from tests.server.tenants.conftest import redis as redis

if TYPE_CHECKING:
    from tests.server.tenants.redis_server import RedisServer


def lease_of(redis: RedisServer, url: str) -> str:
    """Return the Redis key of the only lease that has a URL."""
    keys = redis.command("KEYS", f"{PREFIX}server:*").decode().split("\r\n")
    leases = [key for key in keys if key.startswith(PREFIX)]
    [found] = [key for key in leases if url in redis.command("GET", key).decode()]
    return found
