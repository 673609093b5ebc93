-- What a host holds for the parts placed on it; its free sets are always its declared devices less those. What parts
-- hold is charged to their projects. Needs core, fair_share.

local function held_part(host, id, attempt)
  local text = redis.call("HGET", KEY.host_parts(host), id .. ":" .. attempt)
  return text and cjson.decode(text) or nil
end

local function hold(host, id, attempt, part)
  redis.call("HSET", KEY.host_parts(host), id .. ":" .. attempt, cjson.encode(part))
end

local function declared(host, pool)
  return tonumber(redis.call("HGET", KEY.host(host), "devices:" .. pool) or 0)
end

-- Begin to hold devices.
local function take(host, id, attempt, part)
  charge(part.project, #part.devices, now_ms())
  hold(host, id, attempt, part)
end

-- A part that was placed by an older version, or written off, names no project, and is charged to none.
local function discharge(part)
  if part.project then
    charge(part.project, -#part.devices, now_ms())
  end
end

local function release(host, id, attempt)
  local part = held_part(host, id, attempt)
  if not part then
    return
  end
  redis.call("HDEL", KEY.host_parts(host), id .. ":" .. attempt)
  discharge(part)
  local count = declared(host, part.pool)
  for _, device in ipairs(part.devices) do
    if device < count then
      redis.call("SADD", KEY.host_free(host, part.pool), device)
    end
  end
  wake_placement()
end

-- An orphan is a part that the service has given up on, but whose host has not confirmed that its processes are gone.
local function orphan(host, id, attempt, now)
  local part = held_part(host, id, attempt)
  if part then
    part.orphan, part.lost_at = true, now
    hold(host, id, attempt, part)
  end
end

-- A silent host may never confirm that an orphan is gone: its project is charged no longer.
local function write_off(host, id, attempt)
  local part = held_part(host, id, attempt)
  if part and part.orphan and part.project then
    discharge(part)
    part.project = nil
    hold(host, id, attempt, part)
    wake_placement()
  end
end

local function reset_free(host, pool)
  local key = KEY.host_free(host, pool)
  redis.call("DEL", key)
  for device = 0, declared(host, pool) - 1 do
    redis.call("SADD", key, device)
  end
  for _, text in ipairs(redis.call("HVALS", KEY.host_parts(host))) do
    local part = cjson.decode(text)
    if part.pool == pool then
      redis.call("SREM", key, unpack(part.devices))
    end
  end
  wake_placement()
end

local function forget_host(host)
  for _, text in ipairs(redis.call("HVALS", KEY.host_parts(host))) do
    discharge(cjson.decode(text))
  end
  redis.call("ZREM", KEY.hosts(), host)
  redis.call("DEL", KEY.host(host), KEY.host_parts(host), KEY.host_free(host, "cuda"), KEY.host_free(host, "cpu"))
end
