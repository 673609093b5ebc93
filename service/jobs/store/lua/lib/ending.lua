-- How attempts and jobs end. Needs core, jobs, queue, devices, counts, sweeps.

local MOST_TOLD = 100

local function give_up_part(id, attempt, host, status)
  local name = part_name(id, attempt, host)
  redis.call("HSET", KEY.job_parts(id), host, status)
  redis.call("ZREM", KEY.leases(), name)
  redis.call("ZREM", KEY.outbox(), name)
end

-- The first fault of an attempt decides how it ends; kind is failed, stopped, interrupted, preempted, lost or unclaimed.
local function add_fault(id, kind, error_text)
  redis.call("HSETNX", KEY.job(id), "fault_kind", kind)
  redis.call("HSETNX", KEY.job(id), "fault", error_text)
end

local function forget_dependencies(id)
  for _, needed in ipairs(cjson.decode(field(id, "after"))) do
    redis.call("ZREM", KEY.job_dependents(needed), id)
  end
  redis.call("DEL", KEY.job_waits(id))
end

-- A job that has begun or ended is to be told of where its spec says: the record has the targets, separated by spaces.
-- An export that a process is making stays with it: what it notes at its end makes the next one due.
local function note_for_exports(id)
  for target in string.gmatch(field(id, "exports") or "", "%S+") do
    if tonumber(field(id, "export_held:" .. target) or 0) <= now_ms() then
      redis.call("ZADD", KEY.exports_due(), whole(now_ms()), id .. ":" .. target)
    end
  end
end

-- Closing the last job of a sweep closes the sweep, which is a job too.
local close
function close(id, cap, state, reason, error_text)
  dequeue(id)
  set_state(id, cap, state, reason)
  redis.call("HSET", KEY.job(id), "ended_at", whole(wall_ms()))
  add_count(1, "trivet_jobs_ended_total", field(id, "kind"), state)
  redis.call("HDEL", KEY.job(id), "fault", "fault_kind", "told_to_stop", "lost", "avoid")
  if error_text then
    redis.call("HSET", KEY.job(id), "error", error_text)
  end
  if state ~= "succeeded" then
    redis.call("HDEL", KEY.job(id), "result")
  end
  forget_dependencies(id)
  note_for_exports(id)
  if redis.call("ZCOUNT", KEY.job_dependents(id), 1, 1) > 0 then
    redis.call("RPUSH", KEY.ended(), id .. ":" .. state)
  end
  local sweep = field(id, "sweep")
  if sweep then
    compare(sweep, id)
    if tell_progress(sweep, cap) then
      local outcome, sweep_error = outcome_of_sweep(sweep)
      if outcome == "cancelled" and field(sweep, "state") == "running" then
        set_state(sweep, cap, "cancelling")
      elseif outcome == "succeeded" and field(sweep, "kind") == "chain" then
        gather_results(sweep)
      end
      close(sweep, cap, outcome, nil, sweep_error)
    end
  end
end

local function dependency_error(id, state)
  return cjson.encode({
    type = "DependencyFailed", rank = cjson.null,
    message = "job " .. id .. ", which this job needs, ended as " .. state,
  })
end

local function tell_dependent(dependent, cap, id, state)
  redis.call("ZADD", KEY.job_dependents(id), 0, dependent)
  redis.call("SREM", KEY.job_waits(dependent), id)
  if state ~= "succeeded" then
    close(dependent, cap, "failed", "needed job " .. id .. " ended as " .. state, dependency_error(id, state))
  elseif redis.call("EXISTS", KEY.job_waits(dependent)) == 1 then
    redis.call("HSET", KEY.job(dependent), "reason", dependency_reason(dependent))
  else
    redis.call("HDEL", KEY.job(dependent), "reason")
    enqueue(dependent)
  end
end

-- Queue what waited for jobs that ended, or close it where it can only fail, and what waits for that in turn. At most
-- `most` of them: the rest is left to the next call, since one job may have any number of dependents.
local function tell_dependents(cap, most)
  while most > 0 do
    local ended = redis.call("LINDEX", KEY.ended(), 0)
    if not ended then
      return
    end
    local id, state = string.match(ended, "^(.+):(%a+)$")
    local waiting = redis.call("ZRANGE", KEY.job_dependents(id), 1, 1, "BYSCORE", "LIMIT", 0, most)
    -- It leaves the list only when all were told: the next call goes on with it.
    if #waiting < most then
      redis.call("LPOP", KEY.ended())
    end
    for _, dependent in ipairs(waiting) do
      tell_dependent(dependent, cap, id, state)
    end
    most = most - #waiting - 1
  end
  wake_placement()
end

-- Close a job and, in the same breath as far as there are not too many, what can only fail because of it.
local function end_job(id, cap, state, reason, error_text)
  close(id, cap, state, reason, error_text)
  tell_dependents(cap, MOST_TOLD)
end

local function requeue(id, cap, reason)
  redis.call("HDEL", KEY.job(id), "fault", "fault_kind", "result", "placement")
  redis.call("DEL", KEY.job_parts(id))
  set_state(id, cap, "queued", reason)
  enqueue(id)
end

-- What it takes to go on with an attempt that was lost, should its supervisors come back (see lib/fencing.lua): parts
-- that ended otherwise than with success cannot be had back.
local function keep_lost(id)
  local job = redis.call("HMGET", KEY.job(id), "attempt", "placement", "result")
  local lost = { attempt = tonumber(job[1]), placement = job[2], result = job[3] or nil, parts = {} }
  local parts = redis.call("HGETALL", KEY.job_parts(id))
  for i = 1, #parts, 2 do
    if parts[i + 1] ~= "lost" and parts[i + 1] ~= "succeeded" then
      return
    end
    lost.parts[parts[i]] = parts[i + 1]
  end
  redis.call("HSET", KEY.job(id), "lost", cjson.encode(lost))
end

-- What the job did itself uses its retries, unless it would do it again. What its hosts and the broker did has an
-- allowance of its own.
local function end_faulty(id, limits, kind, fault)
  local job = redis.call("HMGET", KEY.job(id), "attempt", "retries", "retries_used")
  local decoded = cjson.decode(fault)
  local message = "attempt " .. job[1] .. ": " .. decoded.message
  if kind == "interrupted" or kind == "preempted" then
    requeue(id, limits.stream_cap, message .. "; queued again")
  elseif kind == "lost" or kind == "unclaimed" then
    local lost, most = redis.call("HINCRBY", KEY.job(id), "lost_attempts", 1), limits.max_lost_attempts
    if lost > most then
      local reason = lost .. " attempts were lost by no fault of the job; at most " .. most .. " are repeated"
      return end_job(id, limits.stream_cap, "failed", reason, fault)
    end
    keep_lost(id)
    requeue(id, limits.stream_cap, message .. "; queued again without using a retry (" .. lost .. " of " .. most .. ")")
  elseif not decoded.final and tonumber(job[3]) < tonumber(job[2]) then
    local used = redis.call("HINCRBY", KEY.job(id), "retries_used", 1)
    requeue(id, limits.stream_cap, message .. "; retry " .. used .. " of " .. job[2])
  else
    end_job(id, limits.stream_cap, "failed", nil, fault)
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

-- Why a job has ended before it had done all, if its sweep told it so.
local function why_early(id)
  local told, result = field(id, "ends_early"), field(id, "result")
  local reason = told and result and cjson.decode(told).reason
  return reason and cjson.decode(result).ended_early == reason and reason or nil
end

-- After any part ended, and after a cancel: end the attempt when nothing of it is left.
local function end_attempt_if_over(id, limits)
  local job = redis.call("HMGET", KEY.job(id), "state", "attempt", "fault", "fault_kind", "told_to_stop")
  local cancelling, fault = job[1] == "cancelling", job[3]
  local open, failed = count_open(id, job[2], cancelling or fault)
  if open > 0 then
    return
  end
  if cancelling then
    -- A job that was done before anybody told its ranks to stop has succeeded, whatever was asked.
    local in_time = failed == 0 and not job[5]
    count_attempt(in_time and "succeeded" or "cancelled")
    end_job(id, limits.stream_cap, in_time and "succeeded" or "cancelled")
  elseif fault and not (job[4] == "preempted" and failed == 0) then
    count_attempt(job[4], fault)
    end_faulty(id, limits, job[4], fault)
  else
    count_attempt("succeeded")
    end_job(id, limits.stream_cap, "succeeded", why_early(id))
  end
end

-- Cancel a job that is not over: at once while it is queued, else when its parts have obeyed.
local function cancel_job(id, limits)
  local state = field(id, "state")
  if state == "queued" then
    end_job(id, limits.stream_cap, "cancelled")
  elseif state == "starting" or state == "running" then
    set_state(id, limits.stream_cap, "cancelling")
    end_attempt_if_over(id, limits)
  end
end
