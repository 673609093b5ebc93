-- Queue a failed or cancelled job again, with all its retries; it keeps its attempts, artifacts and checkpoints.
-- USES: core jobs queue
-- ARGV: limits: json, job_id: str
-- RETURNS: flat fields and values

local now = now_ms()
local state = field(job_id, "state")
if not state then
  return no_such_job(job_id)
elseif state ~= "failed" and state ~= "cancelled" then
  return refuse("CONFLICT", "job " .. job_id .. " is " .. state .. "; only a failed or cancelled job can be retried")
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
redis.call("HSET", KEY.job(job_id), "queued_at", whole(now), "retries_used", 0, "unclaimed", 0)
redis.call("DEL", KEY.job_parts(job_id))
for _, needed in ipairs(after) do
  redis.call("SADD", KEY.job_dependents(needed), job_id)
end
if #waits > 0 then
  redis.call("SADD", KEY.job_waits(job_id), unpack(waits))
  set_state(job_id, limits.stream_cap, "queued", now, "waits for " .. table.concat(waits, ", "))
else
  set_state(job_id, limits.stream_cap, "queued", now)
  enqueue(job_id)
end
return view(job_id)
