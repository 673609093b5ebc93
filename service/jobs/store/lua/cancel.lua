-- Cancel a job: a queued one at once, an active one when its parts have obeyed.
-- USES: core jobs queue devices ending
-- ARGV: limits: json, job_id: str
-- RETURNS: flat fields and values

local now = now_ms()
local state = field(job_id, "state")
if not state then
  return no_such_job(job_id)
elseif state == "succeeded" or state == "failed" then
  return refuse("CONFLICT", "job " .. job_id .. " has " .. state .. " already; that is final")
elseif state == "queued" then
  end_job(job_id, limits.stream_cap, "cancelled", now)
elseif state == "starting" or state == "running" then
  set_state(job_id, limits.stream_cap, "cancelling", now)
  settle(job_id, limits, now)
end
return view(job_id)
