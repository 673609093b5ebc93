-- How long ago the oldest part was placed that nobody has claimed, in ms; 0 when there is none. A part is first due when
-- it is placed, and with each dispatch later, so its lease tells.
-- COST: the parts that wait for a claim, MOST of them at most.
-- USES: core
-- ARGV: limits: json
-- RETURNS: ms

local MOST = 1000
local now, oldest = now_ms(), 0
for _, name in ipairs(redis.call("ZRANGE", KEY.outbox(), 0, MOST - 1)) do
  local lease_end = tonumber(redis.call("ZSCORE", KEY.leases(), name) or now + limits.starting_lease_ms)
  oldest = math.max(oldest, now - (lease_end - limits.starting_lease_ms))
end
return oldest
