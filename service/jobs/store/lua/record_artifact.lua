-- Enter an artifact of a claimed part in the job's manifest, with its event; the same entry again changes nothing.
-- COST: constant.
-- USES: core jobs artifacts queue device_hours fair_share devices counts sweeps ending fencing
-- ARGV: limits: json, job_id: str, attempt: int, host: str, name: str, entry: str, event: str
-- RETURNS: 1, or 0 of an entry that was there

if not may_write(job_id, attempt, host, limits) then
  return superseded(job_id, attempt, host)
end
local known = redis.call("HGET", KEY.job_artifacts(job_id), name)
if known == entry then
  return 0
end
local bytes, before = cjson.decode(entry).bytes, known and cjson.decode(known).bytes or 0
local refusal = too_much(job_id, name, bytes, before, limits)
if refusal then
  return refuse("CONFLICT", refusal)
end
count_artifact_bytes(job_id, bytes - before)
redis.call("HSET", KEY.job_artifacts(job_id), name, entry)
add_event(job_id, limits.stream_cap, "artifact", event)
return 1
