-- Fair share between projects: what each has used, decayed, and what it holds (see service/jobs/queue/fair_share.py).
-- Needs core, device_hours, and `limits` among the script's arguments.

local AHEAD_MS = 60 * 1000
local LEAST_USE_MS = 1

-- A project's use at a moment of the store's clock: device-ms, devices held, and since when.
local function use_of(project, now)
  local text = redis.call("HGET", KEY.uses(), project)
  if not text then
    return 0, 0, now
  end
  local used, held, at = string.match(text, "^(%S+) (%S+) (%S+)$")
  local half_life = limits.fair_share_half_life_ms
  local kept = 2 ^ (-(now - tonumber(at)) / half_life)
  return tonumber(used) * kept + tonumber(held) * half_life / math.log(2) * (1 - kept), tonumber(held), tonumber(at)
end

-- The project holds so many more devices from now on.
local function charge(project, devices, now)
  local used, held, since = use_of(project, now)
  add_device_hours(project, held, since, now)
  held = held + devices
  if held == 0 and used < LEAST_USE_MS then
    redis.call("HDEL", KEY.uses(), project)
  else
    redis.call("HSET", KEY.uses(), project, string.format("%.17g %d %.0f", used, held, now))
  end
end

-- Of two projects the one with the smaller share is next.
local function share_of(project, now)
  local used, held = use_of(project, now)
  return (used + held * AHEAD_MS) / tonumber(redis.call("HGET", KEY.weights(), project) or 1)
end
