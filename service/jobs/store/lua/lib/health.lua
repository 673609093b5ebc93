-- Which hosts cannot start work: parts that nobody claimed, or whose supervisor ended before anything ran. A host with
-- two such parts and no start since is failing: it gets no work for a while, then one part at a time; each further
-- failure doubles the while. Anything that runs there clears it, and so does an operator. Needs core, devices,
-- counts.

local FAILED_STARTS = 2
local FIRST_PAUSE_MS, LONGEST_PAUSE_MS = 60 * 1000, 3600 * 1000

local function clear_failures(host)
  local fields = { "failed_starts", "failing_since", "failing_reason", "pause_ms", "marked_at", "retry_at" }
  if redis.call("HDEL", KEY.host(host), unpack(fields)) > 0 then
    wake_placement()
  end
end

-- The job's next attempt goes elsewhere, if any other host could ever hold it. Parts that were placed before the host
-- was marked say nothing new about it.
local function start_failed(id, host, part, why, now)
  redis.call("HSET", KEY.job(id), "avoid", host)
  add_count(1, "trivet_failed_starts_total")
  local key = KEY.host(host)
  if redis.call("EXISTS", key) == 0 then
    return
  end
  local failures = redis.call("HINCRBY", key, "failed_starts", 1)
  local old = redis.call("HMGET", key, "marked_at", "pause_ms")
  if failures < FAILED_STARTS or (part.placed_at or 0) < tonumber(old[1] or 0) then
    return
  end
  local pause = math.min(old[2] and 2 * tonumber(old[2]) or FIRST_PAUSE_MS, LONGEST_PAUSE_MS)
  redis.call("HSETNX", key, "failing_since", whole(wall_ms()))
  redis.call("HSET", key, "failing_reason", why, "pause_ms", whole(pause), "marked_at", whole(now),
    "retry_at", whole(now + pause))
end

-- Ranks of this part run, so the host can start work.
local function start_succeeded(id, attempt, host)
  local part = held_part(host, id, attempt)
  if part and not part.working then
    part.working = true
    hold(host, id, attempt, part)
    clear_failures(host)
  end
end
