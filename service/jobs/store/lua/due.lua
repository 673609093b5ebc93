-- Parts to dispatch now. Each stays in the outbox, a little later, until it is claimed.
-- COST: `most`.
-- USES: core
-- ARGV: limits: json, most: int
-- RETURNS: names of parts

local now = now_ms()
local names = redis.call("ZRANGE", KEY.outbox(), "-inf", whole(now), "BYSCORE", "LIMIT", 0, most)
for _, name in ipairs(names) do
  redis.call("ZADD", KEY.outbox(), whole(now + limits.redispatch_ms), name)
end
return names
