-- End a claimed part: free its devices; the last part ends the attempt.
-- USES: core jobs queue devices fencing ending
-- ARGV: limits: json, job_id: str, attempt: int, host: str, status: str, result: str, error: str
-- RETURNS: flat fields and values

if not is_current(job_id, attempt, host, "running") then
  return superseded(job_id, attempt, host)
end
local now = now_ms()
give_up_part(job_id, attempt, host, status)
release(host, job_id, attempt)
if status ~= "succeeded" and field(job_id, "state") ~= "cancelling" then
  add_fault(job_id, status, error)
elseif status == "succeeded" and result ~= "" then
  redis.call("HSET", KEY.job(job_id), "result", result)
end
settle(job_id, limits, now)
return view(job_id)
