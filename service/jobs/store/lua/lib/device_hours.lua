-- Device-ms of a project by hours of the store's clock. Needs core.

local HOUR_MS = 3600 * 1000
-- The longest window that a quota may have.
local MOST_HOURS = 744

-- Call a function with each of the last hours that a span of time has a part of, and the ms of that part.
local function each_hour(from, to, hours, call)
  local last = math.floor(to / HOUR_MS)
  for hour = math.max(math.floor(from / HOUR_MS), last - hours + 1), last do
    local part = math.min(to, (hour + 1) * HOUR_MS) - math.max(from, hour * HOUR_MS)
    if part > 0 then
      call(hour, part)
    end
  end
end

-- So many devices were held for a span of time, which ends now.
local function add_device_hours(project, devices, from, to)
  if devices <= 0 then
    return
  end
  each_hour(from, to, MOST_HOURS, function(hour, part)
    redis.call("HINCRBY", KEY.device_hours(project), whole(hour), whole(devices * part))
  end)
  if redis.call("HLEN", KEY.device_hours(project)) > MOST_HOURS then
    for _, hour in ipairs(redis.call("HKEYS", KEY.device_hours(project))) do
      if tonumber(hour) <= math.floor(to / HOUR_MS) - MOST_HOURS then
        redis.call("HDEL", KEY.device_hours(project), hour)
      end
    end
  end
end

-- Device-ms of the last hours by hour, and their sum; what is held counts until now.
local function device_hours_of(project, held, since, now, hours)
  local by_hour, sum = {}, 0
  local function add(hour, used)
    by_hour[hour] = (by_hour[hour] or 0) + used
    sum = sum + used
  end
  local flat, first = redis.call("HGETALL", KEY.device_hours(project)), math.floor(now / HOUR_MS) - hours + 1
  for i = 1, #flat, 2 do
    if tonumber(flat[i]) >= first then
      add(tonumber(flat[i]), tonumber(flat[i + 1]))
    end
  end
  each_hour(since, now, hours, function(hour, part)
    add(hour, held * part)
  end)
  return by_hour, sum
end

-- In how many ms so much has left the window that less than this is in it, if nothing more is used; nil for never.
local function falls_below(by_hour, sum, most, now, hours)
  local last = math.floor(now / HOUR_MS)
  for hour = last - hours + 1, last do
    sum = sum - (by_hour[hour] or 0)
    if sum < most then
      return (hour + hours) * HOUR_MS - now
    end
  end
  return nil
end
