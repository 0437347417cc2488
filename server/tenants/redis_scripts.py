"""The account rules as Lua scripts for Redis.

Each script is one round trip and one transaction. Time and month come from Redis, so that the
servers' clocks do not matter. The rules are those of accounts.py; the same tests run on both. All
keys start with the first argument, which contains one hash tag in braces:

- `t:TENANT`, a hash: both buckets' levels and their times, requests in flight, and their expected
  cost;
- `held:SERVER`, a hash: a server's reservations, by id;
- `spend:MONTH`, a hash: nanos and tokens per tenant;
- `once:ID`, a hash: nanos and tokens charged for work that is charged once;
- `servers`, sorted by the end of each server's lease; `s:SERVER`, a hash: its last batch of
  settlements and the answer; `beat`: time of the latest lease renewal by any server.
"""

from __future__ import annotations

from typing import Final

PREFIX: Final = "{triolet}:quotas:"

_HEAD: Final = """
local P, server = ARGV[1], ARGV[2]
local clock = redis.call('TIME')
local now = clock[1] + clock[2] / 1e6
local DAY = 86400

local function is_leap(year) return (year % 4 == 0 and year % 100 ~= 0) or year % 400 == 0 end

local function month()
  local days, year, m = math.floor(clock[1] / DAY), 1970, 1
  while days >= (is_leap(year) and 366 or 365) do
    days = days - (is_leap(year) and 366 or 365)
    year = year + 1
  end
  local lengths = {31, is_leap(year) and 29 or 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31}
  while days >= lengths[m] do
    days = days - lengths[m]
    m = m + 1
  end
  return string.format('%04d-%02d', year, m)
end

local spend_key = P .. 'spend:' .. month()
local held_key = P .. 'held:' .. server

local function text(value) return string.format('%.17g', value) end

local function read(tenant)
  local key = P .. 't:' .. tenant
  local v = redis.call('HMGET', key, 'r', 'ra', 't', 'ta', 'n', 'h')
  return {
    key = key, r = tonumber(v[1]), ra = tonumber(v[2]), t = tonumber(v[3]), ta = tonumber(v[4]),
    n = tonumber(v[5]) or 0, h = tonumber(v[6]) or 0,
  }
end

local function write(a)
  redis.call('HSET', a.key, 'n', text(a.n), 'h', text(a.h))
  if a.r then redis.call('HSET', a.key, 'r', text(a.r), 'ra', text(a.ra)) end
  if a.t then redis.call('HSET', a.key, 't', text(a.t), 'ta', text(a.ta)) end
  redis.call('EXPIRE', a.key, DAY)
end

-- A negative limit means no limit.
local function level(value, at, limit)
  if limit < 0 then return 0 end
  if not value then return limit end
  return math.min(limit, value + math.max(0, now - at) * limit / 60)
end

local function charge(a, requests, tokens, request_limit, token_limit)
  if request_limit >= 0 then
    a.r, a.ra = level(a.r, a.ra, request_limit) - requests, now
  end
  if token_limit >= 0 then
    a.t, a.ta = level(a.t, a.ta, token_limit) - tokens, now
  end
end

local function hold(id, tenant, tokens, cost, request_limit, token_limit)
  redis.call('HSET', held_key, id, cjson.encode({
    tenant = tenant, tokens = tokens, cost = cost,
    by_requests = request_limit >= 0, by_tokens = token_limit >= 0,
  }))
  redis.call('EXPIRE', held_key, DAY)
end

local function give_back(a, held)
  a.n, a.h = a.n - 1, a.h - held.cost
  -- Do not refund to a limit that did not exist when the reservation was charged.
  if a.r and held.by_requests ~= false then a.r = a.r + 1 end
  if a.t and held.by_tokens ~= false then a.t = a.t + held.tokens end
end
"""

RESERVE: Final = (
    _HEAD
    + """
local id, tenant, tokens, cost = ARGV[3], ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6])
local request_limit, token_limit = tonumber(ARGV[7]), tonumber(ARGV[8])
local concurrent, budget, grain = tonumber(ARGV[9]), tonumber(ARGV[10]), tonumber(ARGV[11])
local a = read(tenant)
local s = redis.call('HMGET', spend_key, tenant .. ':n', tenant .. ':t')
local spent, used = tonumber(s[1]) or 0, tonumber(s[2]) or 0

local function wait(value, at, limit, amount)
  if limit < 0 or not value then return 0 end
  return math.max(0, (math.min(amount, limit) - grain - level(value, at, limit)) * 60 / limit)
end

local refused, wait_s = '', 0
if id ~= '' then
  local for_request = wait(a.r, a.ra, request_limit, 1)
  local for_tokens = wait(a.t, a.ta, token_limit, tokens)
  if budget >= 0 and spent + a.h >= budget then
    refused = 'budget'
  elseif concurrent >= 0 and a.n >= concurrent then
    refused = 'concurrent'
  elseif for_request > 0 or for_tokens > 0 then
    refused = for_request >= for_tokens and 'requests' or 'tokens'
    wait_s = math.max(for_request, for_tokens)
  else
    charge(a, 1, tokens, request_limit, token_limit)
    a.n, a.h = a.n + 1, a.h + cost
    write(a)
    hold(id, tenant, tokens, cost, request_limit, token_limit)
  end
end
return {
  refused, text(wait_s), text(level(a.r, a.ra, request_limit)),
  text(level(a.t, a.ta, token_limit)), text(a.n), text(spent), text(used),
}
"""
)
"""Reserve the expected use of a request, or refuse it; with an empty id, only read."""

SETTLE: Final = (
    _HEAD
    + """
local number, settlements, once_s = tonumber(ARGV[3]), cjson.decode(ARGV[4]), ARGV[5]
local batch_key = P .. 's:' .. server
local done = redis.call('HMGET', batch_key, 'number', 'result')
if tonumber(done[1] or '0') >= number then return done[2] end
local spent = {}

local function spend(tenant, cost, tokens)
  if cost == 0 and tokens == 0 then return end
  local after = redis.call('HINCRBY', spend_key, tenant .. ':n', string.format('%.0f', cost))
  redis.call('HINCRBY', spend_key, tenant .. ':t', string.format('%.0f', tokens))
  redis.call('EXPIRE', spend_key, 400 * DAY)
  local before = spent[tenant] and spent[tenant][1] or string.format('%.0f', after - cost)
  spent[tenant] = {before, string.format('%.0f', after)}
end

local function charge_once(id, field, amount)
  local key = P .. 'once:' .. id
  local charged = tonumber(redis.call('HGET', key, field) or '0')
  redis.call('HSET', key, field, string.format('%.0f', math.max(charged, amount)))
  redis.call('EXPIRE', key, once_s)
  return math.max(0, amount - charged)
end

for _, s in ipairs(settlements) do
  local a, held = read(s.tenant), redis.call('HGET', held_key, s.id)
  if held then
    redis.call('HDEL', held_key, s.id)
    give_back(a, cjson.decode(held))
  end
  charge(a, s.requests, s.tokens, s.request_limit, s.token_limit)
  write(a)
  if s.once_id ~= '' then
    s.cost, s.tokens = charge_once(s.once_id, 'n', s.cost), charge_once(s.once_id, 't', s.tokens)
  end
  spend(s.tenant, s.cost, s.tokens)
end
local result = cjson.encode(spent)
redis.call('HSET', batch_key, 'number', ARGV[3], 'result', result)
redis.call('EXPIRE', batch_key, DAY)
return result
"""
)
"""Replace reservations by what was used. A batch that is sent again changes nothing and gets the
same answer. Arguments: the batch's number, its settlements, how long to remember charges by
`once_id` [s]."""

BEAT: Final = (
    _HEAD
    + """
local lease_s, most, is_asking = tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5] == '1'
local servers_key, beat_key = P .. 'servers', P .. 'beat'
local last = tonumber(redis.call('GET', beat_key) or '0')
redis.call('SET', beat_key, text(now), 'EX', DAY)
if now - last > lease_s then
  -- No server renewed its lease: Redis was away, not the servers.
  for _, other in ipairs(redis.call('ZRANGE', servers_key, 0, -1)) do
    redis.call('ZADD', servers_key, text(now + lease_s), other)
  end
end
redis.call('ZADD', servers_key, text(now + lease_s), server)
local refunded = 0
for _, dead in ipairs(redis.call('ZRANGEBYSCORE', servers_key, '-inf', text(now))) do
  local key = P .. 'held:' .. dead
  local ids = redis.call('HKEYS', key)
  for i = 1, math.min(#ids, most - refunded) do
    local held = cjson.decode(redis.call('HGET', key, ids[i]))
    redis.call('HDEL', key, ids[i])
    local a = read(held.tenant)
    give_back(a, held)
    write(a)
  end
  local left = math.max(0, #ids - (most - refunded))
  refunded = refunded + #ids - left
  if left == 0 then redis.call('ZREM', servers_key, dead) end
end
local own = is_asking and redis.call('HGETALL', held_key) or {}
return {redis.call('ZCARD', servers_key), refunded, own}
"""
)
"""Renew the lease of a server's reservations; release those of servers with expired leases."""

LEAVE: Final = (
    _HEAD
    + """
if redis.call('HLEN', held_key) == 0 then
  redis.call('ZREM', P .. 'servers', server)
  redis.call('DEL', P .. 's:' .. server)
end
return now
"""
)
"""Remove a server that has settled everything, at once instead of when its lease expires."""

SCRIPTS: Final = (RESERVE, SETTLE, BEAT, LEAVE)
