-- Clock, refusals and small conversions. Only this clock is ever compared.

local function now_ms()
  local time = redis.call("TIME")
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function refuse(code, message)
  return redis.error_reply(code .. " " .. message)
end

local function whole(number)
  return string.format("%.0f", number)
end

local function part_name(id, attempt, host)
  return id .. ":" .. attempt .. ":" .. host
end

local function split_part(name)
  local id, attempt, host = string.match(name, "^([^:]+):(%d+):(.+)$")
  return id, tonumber(attempt), host
end

local function sorted_members(key)
  local members = redis.call("SMEMBERS", key)
  table.sort(members)
  return members
end

-- Something changed that may let a pending job be placed.
local function unsettle()
  redis.call("DEL", KEY.settled())
end
