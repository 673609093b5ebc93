-- Extend the lease of a claimed part, and say whether to go on.
-- COST: constant.
-- USES: core jobs queue device_hours fair_share devices counts sweeps ending fencing
-- ARGV: limits: json, job_id: str, attempt: int, host: str
-- RETURNS: "run" | "stop" | "lost" | "end REASON"

if not may_write(job_id, attempt, host, limits) then
  return "lost"
end
redis.call("ZADD", KEY.leases(), whole(now_ms() + limits.lease_ms), part_name(job_id, attempt, host))
if field(job_id, "state") == "cancelling" then
  redis.call("HSET", KEY.job(job_id), "told_to_stop", 1)
  return "stop"
end
local early = field(job_id, "ends_early")
local goes_on = early and "end " .. cjson.decode(early).reason or "run"
return field(job_id, "fault") and "stop" or goes_on
