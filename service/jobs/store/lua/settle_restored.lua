-- Settle jobs of a restored backup: what ran is queued again, and numbers of attempts leave a gap, so that no supervisor
-- of the service that the backup is of can be taken for one of this one's. Called until the cursor is empty.
-- COST: `most` jobs.
-- USES: core jobs queue device_hours fair_share devices counts sweeps ending
-- ARGV: limits: json, cursor: str, most: int
-- RETURNS: the next cursor, then the ids queued again

local GAP = 1000

local function withdraw_parts(id)
  local attempt = field(id, "attempt")
  for _, host in ipairs(redis.call("HKEYS", KEY.job_parts(id))) do
    give_up_part(id, attempt, host, "withdrawn")
    release(host, id, attempt)
  end
end

local function settle(id)
  local state = field(id, "state")
  local last = math.max(tonumber(field(id, "attempt")), tonumber(field(id, "last_attempt") or 0))
  redis.call("HSET", KEY.job(id), "last_attempt", last + GAP)
  redis.call("HDEL", KEY.job(id), "lost")
  if state == "cancelling" then
    withdraw_parts(id)
    end_job(id, limits.stream_cap, "cancelled")
  elseif state == "starting" or state == "running" then
    withdraw_parts(id)
    requeue(id, limits.stream_cap, "attempt " .. last .. " was running when the backup was made; queued again")
    return true
  end
  return false
end

local ids = redis.call("ZRANGE", KEY.jobs(), cursor == "" and "-" or "(" .. cursor, "+", "BYLEX", "LIMIT", 0, most)
local answer = { #ids == most and ids[#ids] or "" }
for _, id in ipairs(ids) do
  local state = field(id, "state")
  local ended = state == "succeeded" or state == "failed" or state == "cancelled"
  -- The parent of a sweep or chain, which has no shape, is never on a host, and ends with its jobs.
  if not ended and field(id, "shape") and settle(id) then
    answer[#answer + 1] = id
  end
end
for _, host in ipairs(redis.call("ZRANGE", KEY.hosts(), 0, -1)) do
  forget_host(host)
end
return answer
