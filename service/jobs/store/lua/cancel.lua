-- Cancel a job: a queued one at once, an active one when its parts have obeyed.
-- COST: the hosts of the job, and some of its dependents (see lib/ending.lua).
-- USES: core jobs queue devices ending
-- ARGV: limits: json, job_id: str
-- RETURNS: flat fields and values

local state = field(job_id, "state")
if not state then
  return no_such_job(job_id)
elseif state == "succeeded" or state == "failed" then
  return refuse("CONFLICT", "job " .. job_id .. " has " .. state .. " already; that is final")
elseif state == "queued" then
  end_job(job_id, limits.stream_cap, "cancelled")
elseif state == "starting" or state == "running" then
  set_state(job_id, limits.stream_cap, "cancelling")
  end_attempt_if_over(job_id, limits)
end
return view(job_id)
