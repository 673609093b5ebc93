-- Enter an artifact of a claimed part in the job's manifest, with its event; the same entry again changes nothing.
-- COST: constant.
-- USES: core jobs queue devices ending fencing
-- ARGV: limits: json, job_id: str, attempt: int, host: str, name: str, entry: str, event: str
-- RETURNS: 1, or 0 of an entry that was there

if not may_write(job_id, attempt, host, limits) then
  return superseded(job_id, attempt, host)
end
if redis.call("HGET", KEY.job_artifacts(job_id), name) == entry then
  return 0
end
redis.call("HSET", KEY.job_artifacts(job_id), name, entry)
add_event(job_id, limits.stream_cap, "artifact", event)
return 1
