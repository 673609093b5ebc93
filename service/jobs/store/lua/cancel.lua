-- Cancel a job: a queued one at once, an active one when its parts have obeyed.
-- COST: the hosts of the job, and some of its dependents (see lib/ending.lua); of a sweep those of all its jobs.
-- USES: core jobs queue device_hours fair_share devices counts sweeps ending
-- ARGV: limits: json, job_id: str
-- RETURNS: flat fields and values

local state = field(job_id, "state")
if not state then
  return no_such_job(job_id)
elseif state == "succeeded" or state == "failed" then
  return refuse("CONFLICT", "job " .. job_id .. " has " .. state .. " already; that is final")
elseif not is_sweep(job_id) then
  cancel_job(job_id, limits)
elseif state == "running" then
  set_state(job_id, limits.stream_cap, "cancelling")
  for _, child in ipairs(jobs_of(job_id)) do
    cancel_job(child, limits)
  end
end
return view(job_id)
