-- Forget a terminal job that no unfinished job needs; a sweep goes with all its jobs. Where `only_asked` is not empty,
-- say only what would be forgotten.
-- COST: the labels, 32 at most, of a sweep those of each job; the events are freed in the background.
-- USES: core jobs artifacts events sweeps
-- ARGV: job_id: str, only_asked: str
-- RETURNS: the ids that were forgotten, or would be

local MOST_NAMED = 5
local state, sweep = field(job_id, "state"), field(job_id, "sweep")
if not state then
  return no_such_job(job_id)
elseif state ~= "succeeded" and state ~= "failed" and state ~= "cancelled" then
  return refuse("CONFLICT", "job " .. job_id .. " is " .. state .. "; only an ended job can be deleted")
elseif sweep then
  return refuse("CONFLICT", "job " .. job_id .. " is one of sweep " .. sweep .. ", which is deleted as a whole")
end

local ids = jobs_of(job_id)
ids[#ids + 1] = job_id
for _, id in ipairs(ids) do
  local users = redis.call("ZCARD", KEY.job_dependents(id))
  if users > 0 then
    local named = {}
    for _, user in ipairs(redis.call("ZRANGE", KEY.job_dependents(id), 0, MOST_NAMED - 1)) do
      if project_of(user) == project_of(id) then
        named[#named + 1] = user
      end
    end
    local some, others = table.concat(named, ", "), users - #named
    local rest = others > 0 and (#named > 0 and " and " .. others .. " more" or others .. " jobs of other projects") or ""
    return refuse("CONFLICT", "job " .. id .. " is needed by " .. some .. rest)
  end
end

if only_asked ~= "" then
  return ids
end
for _, id in ipairs(ids) do
  redis.call("ZREM", KEY.jobs(), id)
  leave_state(id, field(id, "state"))
  for _, index in ipairs(cjson.decode(field(id, "indexes"))) do
    redis.call("ZREM", KEY.jobs_by(index), id)
  end
  forget_artifacts(id)
  forget_events(id)
  redis.call("UNLINK", KEY.job(id), KEY.jobs_by("needs:" .. id))
  redis.call("DEL", KEY.job_parts(id), KEY.job_batches(id), KEY.sweep(id), KEY.sweep_values(id))
  redis.call("SREM", KEY.sweeps_to_judge(), id)
end
return ids
