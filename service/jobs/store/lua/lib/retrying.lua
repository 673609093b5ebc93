-- How an ended job is queued again. Needs core, jobs, queue, uploads, quotas, submission,
-- sweeps.

local function dependents_are_told(id)
  return redis.call("ZCOUNT", KEY.job_dependents(id), 1, 1) > 0
end

-- Why a job that failed would fail alike, nil where it might not.
local function why_final(id)
  local told = field(id, "error")
  local failure = told and cjson.decode(told)
  if failure and failure.final == true then
    return "job " .. id .. " would fail again: " .. string.match(failure.message, "^[^\n]*")
  end
  return nil
end

-- Why a job cannot be queued again, nil where it can; `going` are those that are queued with it.
local function why_not_again(id, going)
  local state, sweep = field(id, "state"), field(id, "sweep")
  if state ~= "failed" and state ~= "cancelled" then
    return "job " .. id .. " is " .. state .. "; only a failed or cancelled job can be retried"
  elseif dependents_are_told(id) or (sweep and dependents_are_told(sweep)) then
    return "jobs that needed job " .. id .. " are still being ended; try again in a moment"
  elseif sweep and field(sweep, "state") == "cancelling" then
    return "job " .. id .. " belongs to " .. sweep .. ", which is being cancelled; try again once it is cancelled"
  elseif why_final(id) then
    return why_final(id)
  end
  if field(id, "kind") == "script" and not allows_scripts(project_of(id)) then
    return "job " .. id .. " cannot be queued again: project '" .. project_of(id) .. "' lacks scripts: true"
  end
  local weights = cjson.decode(field(id, "weights") or "[]")
  for _, needed in ipairs(cjson.decode(field(id, "after"))) do
    local its_state = field(needed, "state")
    if not its_state or (BADLY[its_state] and not is_listed(weights, needed) and not is_listed(going, needed)) then
      return "job " .. needed .. ", which job " .. id .. " needs, is " .. (its_state or "gone")
    end
  end
  for _, file in ipairs(files_of(id)) do
    if not has_upload(project_of(id), file) then
      return "file " .. file .. ", which job " .. id .. " needs, is gone; upload it again first"
    end
  end
  return nil
end

-- Which quota of its project keeps a job from being queued again, nil where none does.
local function quota_against(id)
  local known = redis.call("HMGET", KEY.job(id), "priority", "timeout_s", "shape")
  local quota, most = over_quota(project_of(id), { priority = known[1], timeout_s = known[2], shape = known[3] })
  return quota and "job " .. id .. " cannot be queued again: project '" .. project_of(id) .. "' may have at most "
    .. whole(most) .. ", its " .. quota
end

-- Queue a failed or cancelled job again, with all its retries.
local function queue_again(id, cap)
  for _, file in ipairs(files_of(id)) do
    use_upload(project_of(id), file)
  end
  -- Its sweep's rule judges it anew. An attempt that the service repeats still ends as the rule has said.
  redis.call("HDEL", KEY.job(id), "error", "result", "placement", "progress", "started_at", "ended_at", "ends_early")
  redis.call("HSET", KEY.job(id), "queued_at", whole(now_ms()), "retries_used", 0, "lost_attempts", 0)
  redis.call("DEL", KEY.job_parts(id))
  if #depend(id, cjson.decode(field(id, "after"))) > 0 then
    set_state(id, cap, "queued", dependency_reason(id))
  else
    set_state(id, cap, "queued")
    enqueue(id)
  end
  local sweep = field(id, "sweep")
  if sweep then
    reopen(sweep, cap)
  end
end
