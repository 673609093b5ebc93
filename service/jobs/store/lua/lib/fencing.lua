-- Who may write for an attempt: the current number, a part that was claimed and not given up. Needs core, jobs, queue,
-- devices, ending.

local function is_current(id, attempt, host, status)
  local job = redis.call("HMGET", KEY.job(id), "state", "attempt")
  local active = job[1] == "starting" or job[1] == "running" or job[1] == "cancelling"
  return active and tonumber(job[2]) == attempt and redis.call("HGET", KEY.job_parts(id), host) == status
end

-- The lost attempt of a job that nobody has claimed since, if every host of it still holds its part.
local function lost_attempt(id, attempt, host)
  local text = field(id, "lost")
  local lost = text and cjson.decode(text)
  if not lost or lost.attempt ~= attempt or lost.parts[host] ~= "lost" then
    return nil
  end
  for name, status in pairs(lost.parts) do
    local part = held_part(name, id, attempt)
    if status == "lost" and not (part and part.orphan) then
      return nil
    end
  end
  return lost
end

-- Go on with a lost attempt, with new leases for all its lost parts; one that was placed in its stead is withdrawn.
local function take_up_again(id, host, lost, limits)
  dequeue(id)
  local newer = field(id, "attempt")
  for _, name in ipairs(redis.call("HKEYS", KEY.job_parts(id))) do
    give_up_part(id, newer, name, "withdrawn")
    release(name, id, newer)
  end
  redis.call("DEL", KEY.job_parts(id))
  local now = now_ms()
  for name, status in pairs(lost.parts) do
    redis.call("HSET", KEY.job_parts(id), name, status == "lost" and "running" or status)
    if status == "lost" then
      local part = held_part(name, id, lost.attempt)
      discharge(part)
      part.orphan, part.lost_at, part.project = nil, nil, project_of(id)
      take(name, id, lost.attempt, part)
      redis.call("ZADD", KEY.leases(), whole(now + limits.lease_ms), part_name(id, lost.attempt, name))
    end
  end
  redis.call("HSET", KEY.job(id), "attempt", lost.attempt, "placement", lost.placement)
  redis.call("HDEL", KEY.job(id), "lost", "avoid")
  if lost.result then
    redis.call("HSET", KEY.job(id), "result", lost.result)
  end
  -- It was not lost after all, and must not count against the allowance.
  redis.call("HINCRBY", KEY.job(id), "lost_attempts", -1)
  set_state(id, limits.stream_cap, "running",
    "attempt " .. lost.attempt .. " goes on: its supervisor on host " .. host .. " is back")
end

-- Whether a part's supervisor may write. One that was given up for lost may again, as long as no newer attempt of its
-- job was claimed: then the attempt goes on as if nothing had happened, and what it finished need not be done twice.
local function may_write(id, attempt, host, limits)
  if is_current(id, attempt, host, "running") then
    return true
  end
  local lost = lost_attempt(id, attempt, host)
  if lost then
    take_up_again(id, host, lost, limits)
  end
  return lost ~= nil
end

local function superseded(id, attempt, host)
  local job = redis.call("HMGET", KEY.job(id), "state", "attempt")
  local now = job[1] and ("the job is " .. job[1] .. " at attempt " .. job[2]) or "the job is gone"
  return refuse("SUPERSEDED", part_name(id, attempt, host) .. " is not current: " .. now)
end
