-- How long the jobs took that succeeded and were submitted last.
-- COST: `most` jobs.
-- USES: core
-- ARGV: most: int
-- RETURNS: {kind, ms, kind, ms, …}

local durations = {}
for _, id in ipairs(redis.call("ZRANGE", KEY.jobs_by("state:succeeded"), "+", "-", "BYLEX", "REV", "LIMIT", 0, most)) do
  local job = redis.call("HMGET", KEY.job(id), "kind", "started_at", "ended_at")
  if job[2] and job[3] then
    durations[#durations + 1] = job[1]
    durations[#durations + 1] = whole(math.max(0, tonumber(job[3]) - tonumber(job[2])))
  end
end
return durations
