"""A Redis server for the tests of hosts, emptied for each test."""

from __future__ import annotations

from tests.server.tenants.conftest import module_redis as module_redis
from tests.server.tenants.conftest import redis as redis
