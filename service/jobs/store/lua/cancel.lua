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
  local children = jobs_of(job_id)
  for i = #children, 1, -1 do -- those that wait for others first: they are not to fail for want of them
    cancel_job(children[i], limits)
  end
end
return view(job_id)
