-- Give up what nobody answers for: ended leases, parts that a dead host did not claim, hosts long silent
-- (not the drained ones: that mark is an operator's, and must be there when the host comes back).
-- A claimed part's devices stay held (an orphan) until its host confirms that its processes are gone.
-- COST: `most` leases, and the devices of hosts that are silent; for each job touched its hosts and some dependents.
-- USES: core jobs queue device_hours fair_share devices counts sweeps ending health
-- ARGV: limits: json, most: int
-- RETURNS: ids of the jobs touched

local now = now_ms()
local touched = {}

local function lose(id, attempt, host, why)
  local status = redis.call("HGET", KEY.job_parts(id), host)
  local lost = { rank = cjson.null }
  if status == "running" then
    lost.type, lost.message = "LeaseLost", "the supervisor on host " .. host .. " stopped renewing its lease"
    give_up_part(id, attempt, host, "lost")
    orphan(host, id, attempt, now)
    add_fault(id, "lost", cjson.encode(lost))
  else
    lost.type, lost.message = "NotClaimed", why
    local part = held_part(host, id, attempt)
    if part then
      start_failed(id, host, part, why, now)
    end
    give_up_part(id, attempt, host, "unclaimed")
    release(host, id, attempt)
    add_fault(id, "unclaimed", cjson.encode(lost))
  end
  end_attempt_if_over(id, limits)
  touched[#touched + 1] = id
end

for _, name in ipairs(redis.call("ZRANGE", KEY.leases(), "-inf", whole(now), "BYSCORE", "LIMIT", 0, most)) do
  local id, attempt, host = split_part(name)
  -- To end one part may have ended other parts of the same attempt, which are then no longer lost.
  if redis.call("ZSCORE", KEY.leases(), name) then
    add_count(1, "trivet_lease_expiries_total")
    lose(id, attempt, host, "nobody on host " .. host .. " claimed the job in time")
  end
end

for _, host in ipairs(redis.call("ZRANGE", KEY.hosts(), "-inf", whole(now), "BYSCORE")) do
  for _, held in ipairs(redis.call("HKEYS", KEY.host_parts(host))) do
    local id, attempt = split_part(held .. ":" .. host)
    local current = redis.call("ZSCORE", KEY.leases(), held .. ":" .. host)
    if current and redis.call("HGET", KEY.job_parts(id), host) == "starting" then
      lose(id, attempt, host, "host " .. host .. " fell silent before it claimed the job")
    end
  end
end

-- A host of an allocation does not come back, and what it held ended with its lease.
local function is_forgotten(host, silent_since)
  local allocation = redis.call("HGET", KEY.host(host), "allocation")
  local after_ms = allocation and allocation ~= "null" and limits.lease_ms or limits.forget_host_ms
  return tonumber(silent_since) <= now - after_ms
end

local silent = redis.call("ZRANGE", KEY.hosts(), "-inf", whole(now), "BYSCORE", "WITHSCORES")
for i = 1, #silent, 2 do
  local host = silent[i]
  local kept = not is_forgotten(host, silent[i + 1]) or redis.call("HEXISTS", KEY.host(host), "draining") == 1
  for _, held in ipairs(redis.call("HKEYS", KEY.host_parts(host))) do
    kept = kept or redis.call("ZSCORE", KEY.leases(), held .. ":" .. host)
    write_off(host, string.match(held, "^([^:]+):(%d+)$"))
  end
  if not kept then
    forget_host(host)
  end
end
return touched
