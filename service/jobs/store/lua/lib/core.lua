-- Clocks, refusals and small conversions.

local function whole(number)
  return string.format("%.0f", number)
end

local LONGEST_STEP_MS, MARK_EVERY_MS = 1000, 250

-- The time of day, for people to read, and for the ends of keys and sessions. It may jump.
local function wall_ms()
  local time = redis.call("TIME")
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- The store's own clock, by which leases and waits are compared. It starts as the time of day and goes on at its pace, but
-- never back, and from one call to the next by a second at most: agents call many times a second, so a longer gap means
-- that the broker was away, hung or restarted, or that the time of day was set. Nobody could renew a lease then, so no
-- lease runs out then.
local function now_ms()
  local wall, mark = wall_ms(), redis.call("HMGET", KEY.clock(), "wall", "now")
  if not mark[1] then
    redis.call("HSET", KEY.clock(), "wall", whole(wall), "now", whole(wall))
    return wall
  end
  local passed = wall - tonumber(mark[1])
  local now = tonumber(mark[2]) + math.max(0, math.min(passed, LONGEST_STEP_MS))
  if passed < 0 or passed >= MARK_EVERY_MS then
    redis.call("HSET", KEY.clock(), "wall", whole(wall), "now", whole(now))
  end
  return now
end

local function refuse(code, message)
  return redis.error_reply(code .. " " .. message)
end

local function part_name(id, attempt, host)
  return id .. ":" .. attempt .. ":" .. host
end

local function split_part(name)
  local id, attempt, host = string.match(name, "^([^:]+):(%d+):(.+)$")
  return id, tonumber(attempt), host
end

-- Something changed that may let a pending job be placed: one of the agents that wait for news looks at once.
local function wake_placement()
  redis.call("DEL", KEY.placement_idle())
  if redis.call("LLEN", KEY.placement_news()) == 0 then
    redis.call("LPUSH", KEY.placement_news(), 1)
  end
end
