-- Running jobs that may be asked to make room, and the first pending jobs that they might make room for: nothing where no
-- pending job has a higher priority than one of them, or where the last call was less than a second ago.
-- COST: `most` jobs of either sort, and the hosts that these run on.
-- USES: core jobs queue
-- ARGV: most: int
-- RETURNS: {} | {ids of pending jobs that nothing holds back, {{id, attempt, priority, placement, ms since it was placed}, …}}

local PAUSE_MS = 1000

local lowest = redis.call("ZRANGE", KEY.preemptible(), 0, 0, "WITHSCORES")
local first = first_in(KEY.pending(), "-inf", "+inf")
if not lowest[1] or not first or -math.floor(first.score / CLASS) <= tonumber(lowest[2]) then
  return {}
elseif not redis.call("SET", KEY.preemption_pause(), 1, "NX", "PX", PAUSE_MS) then
  return {}
end

local now, capacity = now_ms(), cjson.decode(redis.call("GET", KEY.capacity()) or "{}")

-- Whether no room can be made for a job, or it gets none before others do.
local function is_held_back(id)
  if field(id, "launcher") then
    return true
  end
  local device, ranks = string.match(field(id, "shape"), "^(%a+):(%d+)")
  local seen = capacity[device == "auto" and capacity.auto or device]
  if quota_reason(id, project_of(id), tonumber(ranks), capacity) then
    return true
  end
  return seen and seen.barrier and is_behind(id, seen.barrier)
end

local pending = {}
for _, id in ipairs(redis.call("ZRANGE", KEY.pending(), 0, most - 1)) do
  if not is_held_back(id) then
    pending[#pending + 1] = id
  end
end

local running = {}
for _, id in ipairs(redis.call("ZRANGE", KEY.preemptible(), 0, most - 1)) do
  local job = redis.call("HMGET", KEY.job(id), "attempt", "priority", "placement", "fault")
  if not job[4] then
    local elapsed = 0
    for _, share in ipairs(cjson.decode(job[3])) do
      local part = redis.call("HGET", KEY.host_parts(share.host), id .. ":" .. job[1])
      elapsed = math.max(elapsed, part and now - (cjson.decode(part).placed_at or now) or 0)
    end
    running[#running + 1] = { id, job[1], job[2], job[3], whole(elapsed) }
  end
end
return { pending, running }
