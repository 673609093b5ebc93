-- Let the members of another project read a job and what it produces, or no longer.
-- COST: the job's labels and the projects that it is shared with.
-- USES: core jobs members sharing
-- ARGV: job_id: str, project: str, wanted: str
-- RETURNS: flat fields and values

if redis.call("EXISTS", KEY.job(job_id)) == 0 then
  return no_such_job(job_id)
elseif project == project_of(job_id) then
  return refuse("CONFLICT", "job " .. job_id .. " belongs to project " .. project .. "; it is shared with others")
elseif wanted == "" then
  stop_sharing(job_id, project)
elseif not project_exists(project) then
  return no_such_project(project)
else
  start_sharing(job_id, project)
end
return view(job_id)
