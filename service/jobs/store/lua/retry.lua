-- Queue a failed or cancelled job again, with all its retries; it keeps its attempts, artifacts and checkpoints.
-- COST: the jobs that it needs, 64 at most.
-- USES: core jobs queue
-- ARGV: limits: json, job_id: str
-- RETURNS: flat fields and values

local state = field(job_id, "state")
if not state then
  return no_such_job(job_id)
elseif state ~= "failed" and state ~= "cancelled" then
  return refuse("CONFLICT", "job " .. job_id .. " is " .. state .. "; only a failed or cancelled job can be retried")
end
if redis.call("ZCOUNT", KEY.job_dependents(job_id), 1, 1) > 0 then
  return refuse("CONFLICT", "jobs that needed job " .. job_id .. " are still being ended; try again in a moment")
end

local after, waits = cjson.decode(field(job_id, "after")), {}
for _, needed in ipairs(after) do
  local its_state = field(needed, "state")
  if not its_state or its_state == "failed" or its_state == "cancelled" then
    return refuse("CONFLICT", "job " .. needed .. ", which job " .. job_id .. " needs, is " .. (its_state or "gone"))
  elseif its_state ~= "succeeded" then
    waits[#waits + 1] = needed
  end
end

redis.call("HDEL", KEY.job(job_id), "error", "result", "placement", "progress", "started_at", "ended_at")
redis.call("HSET", KEY.job(job_id), "queued_at", whole(now_ms()), "retries_used", 0, "lost_attempts", 0)
redis.call("DEL", KEY.job_parts(job_id))
for _, needed in ipairs(after) do
  redis.call("ZADD", KEY.job_dependents(needed), 0, job_id)
end
for _, needed in ipairs(waits) do
  redis.call("ZADD", KEY.job_dependents(needed), 1, job_id)
end
if #waits > 0 then
  redis.call("SADD", KEY.job_waits(job_id), unpack(waits))
  set_state(job_id, limits.stream_cap, "queued", dependency_reason(job_id))
else
  set_state(job_id, limits.stream_cap, "queued")
  enqueue(job_id)
end
return view(job_id)
