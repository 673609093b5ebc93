-- End a claimed part: free its devices; the last part ends the attempt.
-- COST: the hosts of the job, and some of its dependents (see lib/ending.lua).
-- USES: core jobs queue device_hours fair_share devices counts sweeps ending fencing health
-- ARGV: limits: json, job_id: str, attempt: int, host: str, status: str, result: str, error: str
-- RETURNS: flat fields and values

if not may_write(job_id, attempt, host, limits) then
  return superseded(job_id, attempt, host)
end
local part = held_part(host, job_id, attempt)
if status ~= "lost" then
  clear_failures(host)
elseif not part.working then
  start_failed(job_id, host, part, cjson.decode(error).message, now_ms())
end
give_up_part(job_id, attempt, host, status)
release(host, job_id, attempt)
if status ~= "succeeded" and field(job_id, "state") ~= "cancelling" then
  add_fault(job_id, status, error)
elseif status == "succeeded" and result ~= "" then
  redis.call("HSET", KEY.job(job_id), "result", result)
end
end_attempt_if_over(job_id, limits)
return view(job_id)
