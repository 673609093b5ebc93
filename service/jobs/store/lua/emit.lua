-- Append events of a claimed part to the job's stream; each is a pair of type and JSON.
-- USES: core jobs fencing
-- ARGV: limits: json, job_id: str, attempt: int, host: str, progress: str, *pairs: str
-- RETURNS: 1

if not is_current(job_id, attempt, host, "running") then
  return superseded(job_id, attempt, host)
end
for i = 1, #pairs, 2 do
  add_event(job_id, limits.stream_cap, pairs[i], pairs[i + 1])
end
if progress ~= "" then
  redis.call("HSET", KEY.job(job_id), "progress", progress)
end
return 1
