-- Take exports that are to be made now. Each goes to one caller, and comes back after hold_ms unless it was noted; that
-- of a job which is not over, after live_hold_ms.
-- COST: most.
-- USES: core jobs
-- ARGV: most: int, hold_ms: int, live_hold_ms: int
-- RETURNS: job:target, what is kept of it (JSON, or empty), "live" if the job is not over (or empty), job:target, ...

local OVER = { succeeded = true, failed = true, cancelled = true }
local now, found = now_ms(), {}
for _, name in ipairs(redis.call("ZRANGE", KEY.exports_due(), "-inf", whole(now), "BYSCORE", "LIMIT", 0, most)) do
  local id, target = string.match(name, "^([^:]+):(.+)$")
  local state = field(id, "state")
  if state then
    local held_until = whole(now + (OVER[state] and hold_ms or live_hold_ms))
    redis.call("ZADD", KEY.exports_due(), held_until, name)
    redis.call("HSET", KEY.job(id), "export_held:" .. target, held_until)
    found[#found + 1], found[#found + 2] = name, field(id, "export:" .. target) or ""
    found[#found + 1] = OVER[state] and "" or "live"
  else
    redis.call("ZREM", KEY.exports_due(), name)
  end
end
return found
