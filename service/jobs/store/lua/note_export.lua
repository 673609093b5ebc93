-- Keep what came of an export: it is over, or due again in again_ms (0: over), with a line in the job's log unless the
-- event is empty.
-- USES: core jobs
-- ARGV: limits: json, job_id: str, target: str, state: str, again_ms: int, event: str
-- RETURNS: 1 if the job is still there

local name = job_id .. ":" .. target
if redis.call("EXISTS", KEY.job(job_id)) == 0 then
  redis.call("ZREM", KEY.exports_due(), name)
  return 0
end
if again_ms > 0 then
  redis.call("ZADD", KEY.exports_due(), "XX", whole(now_ms() + again_ms), name)
  redis.call("HSET", KEY.job(job_id), "export:" .. target, state)
else
  redis.call("ZREM", KEY.exports_due(), name)
  redis.call("HDEL", KEY.job(job_id), "export:" .. target)
end
if event ~= "" then
  add_event(job_id, limits.stream_cap, "log", event)
end
return 1
