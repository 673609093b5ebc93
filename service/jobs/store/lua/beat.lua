-- A host reports itself: what it has, and which attempts it supervises.
-- COST: the host's devices, and what it supervises.
-- USES: core device_hours fair_share devices
-- ARGV: limits: json, host: str, address: str, cuda: str, cuda_count: int, cpu_slots: int,
-- ARGV: versions: str, threads: str, isolation: str, launchers: str, allocation: str,
-- ARGV: overcommitted: str, clock_ms: int, live: json
-- RETURNS: {"1" when draining, else "0", "job:attempt" to kill, …}

local now = now_ms()
local key = KEY.host(host)
local count = { cuda = cuda_count, cpu = cpu_slots }
local known = redis.call("EXISTS", key) == 1
for pool, devices in pairs(count) do
  if not known or declared(host, pool) ~= devices then
    redis.call("HSET", key, "devices:" .. pool, devices)
    reset_free(host, pool)
  end
end
redis.call("HSET", key, "name", host, "address", address, "cuda", cuda, "versions", versions, "threads", threads,
  "isolation", isolation, "launchers", launchers, "allocation", allocation, "overcommitted", overcommitted,
  "seen_at", whole(wall_ms()), "clock_skew_ms", whole(clock_ms - wall_ms()))
if tonumber(redis.call("ZSCORE", KEY.hosts(), host) or 0) <= now then
  wake_placement()
end
redis.call("ZADD", KEY.hosts(), whole(now + limits.heartbeat_ms), host)

local is_live = {}
for _, name in ipairs(live) do
  is_live[name] = true
end

-- A supervisor that was lost has a moment to take up its attempt again, while nobody else has claimed its job.
local function may_come_back(id, attempt, part)
  local lost = now - (part.lost_at or 0) < limits.lease_ms / 3 and redis.call("HGET", KEY.job(id), "lost")
  return lost and cjson.decode(lost).attempt == tonumber(attempt)
end

local held = redis.call("HGETALL", KEY.host_parts(host))
local may_live = {}
for i = 1, #held, 2 do
  local name, part = held[i], cjson.decode(held[i + 1])
  local id, attempt = string.match(name, "^([^:]+):(%d+)$")
  if not part.orphan then
    may_live[name] = true
  elseif not is_live[name] then
    release(host, id, attempt)
  else
    may_live[name] = may_come_back(id, attempt, part)
  end
end

local reply = { redis.call("HGET", key, "draining") and "1" or "0" }
for _, name in ipairs(live) do
  if not may_live[name] then
    reply[#reply + 1] = name
  end
end
return reply
