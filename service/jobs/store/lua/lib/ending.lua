-- How attempts and jobs end. Needs core, jobs, queue, devices.

local function give_up_part(id, attempt, host, status)
  local name = part_name(id, attempt, host)
  redis.call("HSET", KEY.job_parts(id), host, status)
  redis.call("ZREM", KEY.leases(), name)
  redis.call("ZREM", KEY.outbox(), name)
end

-- The first fault of an attempt decides how it ends; kind is failed, stopped, interrupted, lost or unclaimed.
local function add_fault(id, kind, error_text)
  redis.call("HSETNX", KEY.job(id), "fault_kind", kind)
  redis.call("HSETNX", KEY.job(id), "fault", error_text)
end

local function forget_dependencies(id)
  for _, needed in ipairs(cjson.decode(field(id, "after"))) do
    redis.call("SREM", KEY.job_dependents(needed), id)
  end
  redis.call("DEL", KEY.job_waits(id))
end

local function close(id, cap, state, now, reason, error_text)
  dequeue(id)
  set_state(id, cap, state, now, reason)
  redis.call("HSET", KEY.job(id), "ended_at", whole(now))
  redis.call("HDEL", KEY.job(id), "fault", "fault_kind", "told_to_stop")
  if error_text then
    redis.call("HSET", KEY.job(id), "error", error_text)
  end
  if state ~= "succeeded" then
    redis.call("HDEL", KEY.job(id), "result")
  end
  forget_dependencies(id)
end

local function dependency_error(id, state)
  return cjson.encode({
    type = "DependencyFailed", rank = cjson.null,
    message = "job " .. id .. ", which this job needs, ended as " .. state,
  })
end

-- Close a job and, in the same breath, everything that can only fail because of it.
local function end_job(id, cap, state, now, reason, error_text)
  local work = { { id = id, state = state, reason = reason, error_text = error_text } }
  while #work > 0 do
    local item = table.remove(work, 1)
    close(item.id, cap, item.state, now, item.reason, item.error_text)
    for _, dependent in ipairs(sorted_members(KEY.job_dependents(item.id))) do
      if redis.call("SREM", KEY.job_waits(dependent), item.id) == 1 then
        if item.state ~= "succeeded" then
          redis.call("DEL", KEY.job_waits(dependent))
          work[#work + 1] = {
            id = dependent, state = "failed", reason = "needed job " .. item.id .. " ended as " .. item.state,
            error_text = dependency_error(item.id, item.state),
          }
        elseif redis.call("EXISTS", KEY.job_waits(dependent)) == 0 then
          redis.call("HDEL", KEY.job(dependent), "reason")
          enqueue(dependent)
        end
      end
    end
  end
end

local function requeue(id, cap, now, reason)
  redis.call("HDEL", KEY.job(id), "fault", "fault_kind", "result", "placement")
  redis.call("DEL", KEY.job_parts(id))
  set_state(id, cap, "queued", now, reason)
  enqueue(id)
end

local function end_faulty(id, limits, now, kind, fault)
  local job = redis.call("HMGET", KEY.job(id), "attempt", "retries", "retries_used", "unclaimed")
  local message = "attempt " .. job[1] .. ": " .. cjson.decode(fault).message
  if kind == "interrupted" then
    requeue(id, limits.stream_cap, now, message .. "; queued again")
  elseif kind == "unclaimed" and tonumber(job[4]) < limits.max_unclaimed then
    redis.call("HINCRBY", KEY.job(id), "unclaimed", 1)
    requeue(id, limits.stream_cap, now, message .. "; queued again")
  elseif tonumber(job[3]) < tonumber(job[2]) then
    local used = redis.call("HINCRBY", KEY.job(id), "retries_used", 1)
    requeue(id, limits.stream_cap, now, message .. "; retry " .. used .. " of " .. job[2])
  else
    end_job(id, limits.stream_cap, "failed", now, nil, fault)
  end
end

-- Open parts of the current attempt. Unclaimed ones of an attempt that is to end hold no process: they end here.
local function count_open(id, attempt, ending)
  local open, failed = 0, 0
  local parts = redis.call("HGETALL", KEY.job_parts(id))
  for i = 1, #parts, 2 do
    local host, status = parts[i], parts[i + 1]
    if status == "starting" and ending then
      give_up_part(id, attempt, host, "withdrawn")
      release(host, id, attempt)
      failed = failed + 1
    elseif status == "starting" or status == "running" then
      open = open + 1
    elseif status ~= "succeeded" then
      failed = failed + 1
    end
  end
  return open, failed
end

-- After any part ended, and after a cancel: end the attempt when nothing of it is left.
local function settle(id, limits, now)
  local job = redis.call("HMGET", KEY.job(id), "state", "attempt", "fault", "fault_kind", "told_to_stop")
  local cancelling, fault = job[1] == "cancelling", job[3]
  local open, failed = count_open(id, job[2], cancelling or fault)
  if open > 0 then
    return
  end
  if cancelling then
    local in_time = failed == 0 and not job[5]
    end_job(id, limits.stream_cap, in_time and "succeeded" or "cancelled", now)
  elseif fault then
    end_faulty(id, limits, now, job[4], fault)
  else
    end_job(id, limits.stream_cap, "succeeded", now)
  end
end
