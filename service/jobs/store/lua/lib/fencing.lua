-- Who may write for an attempt: the current number, a part that was claimed and not given up. Needs core, jobs.

local function is_current(id, attempt, host, status)
  local job = redis.call("HMGET", KEY.job(id), "state", "attempt")
  local active = job[1] == "starting" or job[1] == "running" or job[1] == "cancelling"
  return active and tonumber(job[2]) == attempt and redis.call("HGET", KEY.job_parts(id), host) == status
end

local function superseded(id, attempt, host)
  local job = redis.call("HMGET", KEY.job(id), "state", "attempt")
  local now = job[1] and ("the job is " .. job[1] .. " at attempt " .. job[2]) or "the job is gone"
  return refuse("SUPERSEDED", part_name(id, attempt, host) .. " is not current: " .. now)
end
