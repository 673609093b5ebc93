-- Forget a terminal job that no unfinished job needs.
-- COST: the labels, 32 at most; the events are freed in the background.
-- USES: core jobs
-- ARGV: job_id: str
-- RETURNS: 1

local MOST_NAMED = 5
local state = field(job_id, "state")
if not state then
  return no_such_job(job_id)
elseif state ~= "succeeded" and state ~= "failed" and state ~= "cancelled" then
  return refuse("CONFLICT", "job " .. job_id .. " is " .. state .. "; only an ended job can be deleted")
end
local users = redis.call("ZCARD", KEY.job_dependents(job_id))
if users > 0 then
  local some = table.concat(redis.call("ZRANGE", KEY.job_dependents(job_id), 0, MOST_NAMED - 1), ", ")
  local others = users > MOST_NAMED and " and " .. users - MOST_NAMED .. " more" or ""
  return refuse("CONFLICT", "job " .. job_id .. " is needed by " .. some .. others)
end

redis.call("ZREM", KEY.jobs(), job_id)
redis.call("ZREM", KEY.jobs_by("state:" .. state), job_id)
for _, index in ipairs(cjson.decode(field(job_id, "indexes"))) do
  redis.call("ZREM", KEY.jobs_by(index), job_id)
end
redis.call("UNLINK", KEY.job(job_id), KEY.job_events(job_id), KEY.job_artifacts(job_id))
redis.call("DEL", KEY.job_parts(job_id), KEY.job_batches(job_id))
return 1
