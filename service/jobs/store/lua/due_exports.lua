-- Take exports that are to be made now. Each goes to one caller, and comes back after hold_ms unless it was noted.
-- COST: most.
-- USES: core jobs
-- ARGV: most: int, hold_ms: int
-- RETURNS: job:target, JSON of what it has failed at (or empty), job:target, ...

local now, found = now_ms(), {}
for _, name in ipairs(redis.call("ZRANGE", KEY.exports_due(), "-inf", whole(now), "BYSCORE", "LIMIT", 0, most)) do
  local id, target = string.match(name, "^([^:]+):(.+)$")
  if redis.call("EXISTS", KEY.job(id)) == 1 then
    redis.call("ZADD", KEY.exports_due(), whole(now + hold_ms), name)
    found[#found + 1], found[#found + 2] = name, field(id, "export:" .. target) or ""
  else
    redis.call("ZREM", KEY.exports_due(), name)
  end
end
return found
