-- Forget a terminal job that no unfinished job needs.
-- USES: core jobs
-- ARGV: job_id: str
-- RETURNS: 1

local state = field(job_id, "state")
if not state then
  return no_such_job(job_id)
elseif state ~= "succeeded" and state ~= "failed" and state ~= "cancelled" then
  return refuse("CONFLICT", "job " .. job_id .. " is " .. state .. "; only an ended job can be deleted")
end
local users = sorted_members(KEY.job_dependents(job_id))
if #users > 0 then
  return refuse("CONFLICT", "job " .. job_id .. " is needed by " .. table.concat(users, ", "))
end

redis.call("ZREM", KEY.jobs(), job_id)
redis.call("ZREM", KEY.jobs_by("state:" .. state), job_id)
for _, index in ipairs(cjson.decode(field(job_id, "indexes"))) do
  redis.call("ZREM", KEY.jobs_by(index), job_id)
end
redis.call("DEL", KEY.job(job_id), KEY.job_events(job_id), KEY.job_artifacts(job_id))
redis.call("DEL", KEY.job_parts(job_id), KEY.job_batches(job_id))
return 1
