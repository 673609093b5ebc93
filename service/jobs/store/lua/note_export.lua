-- Keep what came of an export: it is over, or due again in again_ms (0: over), with a line in the job's log unless the
-- event is empty. One that was made while the job went on is due at once if the job has ended meanwhile.
-- USES: core jobs
-- ARGV: limits: json, job_id: str, target: str, state: str, live: str, again_ms: int, event: str
-- RETURNS: 1 if the job is still there

local OVER = { succeeded = true, failed = true, cancelled = true }
local name, job_state = job_id .. ":" .. target, field(job_id, "state")
if not job_state then
  redis.call("ZREM", KEY.exports_due(), name)
  return 0
end
redis.call("HDEL", KEY.job(job_id), "export_held:" .. target)
local has_ended = live ~= "" and OVER[job_state]
if again_ms > 0 or has_ended then
  redis.call("ZADD", KEY.exports_due(), "XX", whole(now_ms() + (has_ended and 0 or again_ms)), name)
else
  redis.call("ZREM", KEY.exports_due(), name)
end
if state ~= "" then
  redis.call("HSET", KEY.job(job_id), "export:" .. target, state)
else
  redis.call("HDEL", KEY.job(job_id), "export:" .. target)
end
if event ~= "" then
  add_event(job_id, limits.stream_cap, "log", event)
end
return 1
