-- Parts to dispatch now. Each stays in the outbox, a little later, until it is claimed.
-- COST: `most`.
-- USES: core counts
-- ARGV: limits: json, most: int
-- RETURNS: names of parts

local now = now_ms()
local names, retries = redis.call("ZRANGE", KEY.outbox(), "-inf", whole(now), "BYSCORE", "LIMIT", 0, most), 0
for _, name in ipairs(names) do
  -- An entry is first due when it is made, and with it its lease.
  local lease_end = tonumber(redis.call("ZSCORE", KEY.leases(), name) or 0)
  if tonumber(redis.call("ZSCORE", KEY.outbox(), name)) > lease_end - limits.starting_lease_ms then
    retries = retries + 1
  end
  redis.call("ZADD", KEY.outbox(), whole(now + limits.redispatch_ms), name)
end
if #names > 0 then
  add_count(#names, "trivet_dispatches_total")
  add_count(retries, "trivet_dispatch_retries_total")
end
return names
