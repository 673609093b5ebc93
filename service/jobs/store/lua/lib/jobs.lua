-- A job's record: its view, with why it waits, its events, its state. Needs core.

local function field(id, name)
  return redis.call("HGET", KEY.job(id), name) or nil
end

-- Jobs that were accepted before there were projects belong to the default one.
local function project_of(id)
  return field(id, "project") or "default"
end

-- Whether a project's members may read a job: it is theirs, or shared with them.
local function is_visible(id, project)
  return project_of(id) == project or redis.call("ZSCORE", KEY.jobs_by("visible:" .. project), id)
end

-- The uploads that a job may read: those of its project that its submission named, and was checked for.
local function files_of(id)
  local prefix, files = "file:" .. project_of(id) .. "/", {}
  for _, index in ipairs(cjson.decode(field(id, "indexes"))) do
    if string.sub(index, 1, #prefix) == prefix then
      files[#files + 1] = string.sub(index, #prefix + 1)
    end
  end
  return files
end

local function no_such_job(id)
  return refuse("NOTFOUND", "there is no job " .. id)
end

-- Why a job is not in the queue yet: the jobs that it needs and that have not ended, in the order of its `after`.
local function dependency_reason(id)
  local open = {}
  for _, needed in ipairs(cjson.decode(field(id, "after"))) do
    if redis.call("SISMEMBER", KEY.job_waits(id), needed) == 1 then
      open[#open + 1] = needed
    end
  end
  return "waits for " .. table.concat(open, ", ")
end

-- What a job is told about another one: its name, unless its project may not read that.
local function name_for(id, other)
  return is_visible(other, project_of(id)) and "job " .. other or "a job of another project"
end

-- Whether a pending job comes after the barrier of its pool, while that is pending itself.
local function is_behind(id, barrier)
  local score = tonumber(redis.call("ZSCORE", KEY.pending(), id))
  if barrier.id == id or not redis.call("ZSCORE", KEY.pending(), barrier.id) then
    return false
  end
  local is_equal = redis.call("HGET", KEY.job(id), "priority") == redis.call("HGET", KEY.job(barrier.id), "priority")
  if is_equal and barrier.yields_to and barrier.yields_to[project_of(id)] then
    return false
  end
  return score > barrier.score or (score == barrier.score and id > barrier.id)
end

-- Why its project's quotas keep a pending job from being placed, from what placement last saw (see place.lua), or nil.
local function quota_reason(id, project, ranks, capacity)
  local bound = capacity.projects and capacity.projects[project]
  if not bound then
    return nil
  end
  local hours = bound.hours
  if hours then
    local again = hours.below_in_h and ", and falls below that in " .. hours.below_in_h .. " h at the earliest" or ""
    return "project " .. project .. " has used " .. hours.used .. " of " .. hours.most .. " device-hours in "
      .. hours.window .. " h" .. again
  elseif bound.devices and bound.held + ranks > bound.devices then
    return "project " .. project .. " uses " .. bound.held .. " of " .. bound.devices .. " devices, and this job needs "
      .. ranks
  elseif bound.barrier and is_behind(id, bound.barrier) then
    return "is held back by job " .. bound.barrier.id .. " of its project, which has waited too long to be overtaken"
  end
  return nil
end

local capacity_seen

-- Why a pending job, whose record is `known`, was not placed yet, from what placement last saw of the fleet (see
-- place.lua).
local function waiting_reason(id, known)
  capacity_seen = capacity_seen or redis.call("GET", KEY.capacity()) or "{}"
  local capacity = type(capacity_seen) == "string" and cjson.decode(capacity_seen) or capacity_seen
  capacity_seen = capacity
  local device, ranks, hosts = string.match(known.shape, "^(%a+):(%d+):(%d+)$")
  ranks, hosts = tonumber(ranks), tonumber(hosts)
  if known.launcher then
    return known.allocating or "waits for a worker that serves the launcher " .. known.launcher
  end
  local pool = device == "auto" and capacity.auto or device
  local seen = capacity[pool]
  if not seen then
    return "waits for devices"
  end
  local over_quota = quota_reason(id, known.project or "default", ranks, capacity)
  if over_quota then
    return over_quota .. (seen.away and "; " .. seen.away or "")
  elseif seen.barrier and is_behind(id, seen.barrier) then
    local why = seen.barrier.gets_room and "which others make room for" or "which has waited too long to be overtaken"
    return "is held back by " .. name_for(id, seen.barrier.id) .. ", " .. why
  end
  local where = hosts == 1 and "one host" or "at most " .. hosts .. " hosts"
  local needs = ranks .. " free " .. pool .. (ranks == 1 and " device" or " devices on " .. where)
  local together, away = seen.together, seen.away and " (" .. seen.away .. ")" or ""
  if ranks <= (together[math.min(hosts, #together)] or 0) then
    local elsewhere = known.avoid and ", other than host " .. known.avoid .. ", where it did not start" or ""
    return "waits for " .. needs .. elsewhere .. away .. (seen.slow and " (" .. seen.slow .. ")" or "")
  end
  local remedy = ""
  for wider, held in ipairs(together) do
    if held >= ranks then
      remedy = "; max_hosts of " .. wider .. " would do"
      break
    end
  end
  return "no hosts that take work have " .. needs .. ", even when idle" .. away .. remedy
end

-- The jobs of a sweep, counted by state, and the best one, as JSON.
local function children_of(sweep)
  local flat, children = redis.call("HGETALL", KEY.sweep(sweep)), {}
  for i = 1, #flat, 2 do
    children[flat[i]] = string.match(flat[i + 1], "^%d+$") and tonumber(flat[i + 1]) or flat[i + 1]
  end
  local best = children.best
  for _, name in ipairs({ "metric", "mode", "rule", "follows", "judged", "best" }) do
    children[name] = nil
  end
  local text = cjson.encode(children)
  return best and '{"best":' .. best .. "," .. string.sub(text, 2) or text
end

-- Add to a job's record, whose fields are also in `known`, why it was not placed yet, or the jobs of a sweep.
local function explained(id, record, known)
  if known.shape then
    if known.state == "queued" and redis.call("ZSCORE", KEY.pending(), id) then
      record[#record + 1] = "waiting"
      record[#record + 1] = waiting_reason(id, known)
    end
  elseif redis.call("EXISTS", KEY.sweep(id)) == 1 then
    record[#record + 1] = "children"
    record[#record + 1] = children_of(id)
  end
  return record
end

-- The record as a flat list of fields and values; a pending job says why it was not placed yet.
local function view(id)
  local record, known = redis.call("HGETALL", KEY.job(id)), {}
  for i = 1, #record, 2 do
    known[record[i]] = record[i + 1]
  end
  return explained(id, record, known)
end

-- The same with no other fields than lists show, without the spec.
local function brief_view(id)
  local values, record, known = redis.call("HMGET", KEY.job(id), unpack(LISTED)), {}, {}
  for i, name in ipairs(LISTED) do
    if values[i] then
      known[name] = values[i]
      record[#record + 1] = name
      record[#record + 1] = values[i]
    end
  end
  return explained(id, record, known)
end

local function add_event(id, cap, kind, data)
  redis.call("XADD", KEY.job_events(id), "MAXLEN", "~", cap, "*", "t", kind, "d", data)
end

local MOST_WEBHOOK_CHANGES = 100000

-- What webhooks are told: the job as it is now, since it may be gone when they are.
-- The URL is that of the job's own spec, where that is to be told, too.
local function add_change(id, event, url)
  local known = redis.call("HMGET", KEY.job(id), "kind", "name", "owner")
  local told = {
    job = id, kind = known[1], name = known[2], owner = known[3], project = project_of(id), url = url,
    state = event.state, attempt = event.attempt, reason = event.reason, time = event.time, metric = event.metric,
    format = url and field(id, "notify_format") or nil,
  }
  redis.call("XADD", KEY.webhook_changes(), "MAXLEN", "~", MOST_WEBHOOK_CHANGES, "*", "d", cjson.encode(told))
end

local function note_for_webhooks(id, event)
  local asked = redis.call("HMGET", KEY.job(id), "notify", "notify_on")
  local url = asked[1] and string.find(asked[2], " " .. event.state .. " ", 1, true) and asked[1] or nil
  if url or redis.call("EXISTS", KEY.webhooks_present()) == 1 then
    add_change(id, event, url)
  end
end

-- Tell of each number that has reached its threshold, unless one of that name had done so before.
local function note_reached(id, reached)
  local known = redis.call("HMGET", KEY.job(id), "notify", "state", "attempt")
  for _, each in ipairs(reached) do
    if known[1] and redis.call("HSETNX", KEY.job(id), "reached:" .. each.name, "1") == 1 then
      local event = { state = known[2], attempt = tonumber(known[3]), time = wall_ms() / 1000, metric = each }
      add_change(id, event, known[1])
    end
  end
end

local function add_state_event(id, cap, state, reason)
  local event = {
    type = "state", time = wall_ms() / 1000, rank = cjson.null,
    state = state, attempt = tonumber(field(id, "attempt")), reason = reason,
  }
  add_event(id, cap, "state", cjson.encode(event))
  note_for_webhooks(id, event)
end

-- The indexes of a state: of all jobs, and of those of one project.
local function state_indexes(id, state)
  return KEY.jobs_by("state:" .. state), KEY.jobs_by("state:" .. state .. ":" .. project_of(id))
end

local function enter_state(id, state)
  for _, index in ipairs({ state_indexes(id, state) }) do
    redis.call("ZADD", index, 0, id)
  end
end

local function leave_state(id, state)
  for _, index in ipairs({ state_indexes(id, state) }) do
    redis.call("ZREM", index, id)
  end
end

local MOST_PHASES = 16

-- What the attempt has begun with, and when (Unix seconds), after what it had begun with before.
local function add_phases(id, begun)
  local phases = cjson.decode(field(id, "phases") or "[]")
  for _, each in ipairs(begun) do
    if #phases < MOST_PHASES then
      phases[#phases + 1] = each
    end
  end
  redis.call("HSET", KEY.job(id), "phases", cjson.encode(phases))
end

-- Hash, index and event of a state belong together; this is the only place that writes any of them.
local function set_state(id, cap, state, reason)
  local old, sweep = unpack(redis.call("HMGET", KEY.job(id), "state", "sweep"))
  assert(MOVES[old][state], "job " .. id .. " cannot go from " .. old .. " to " .. state)
  redis.call("HSET", KEY.job(id), "state", state)
  if reason then
    redis.call("HSET", KEY.job(id), "reason", reason)
  else
    redis.call("HDEL", KEY.job(id), "reason")
  end
  if state == "starting" then
    add_phases(id, { { "starting", wall_ms() / 1000 } })
  elseif state == "queued" then
    redis.call("HDEL", KEY.job(id), "phases")
  end
  leave_state(id, old)
  enter_state(id, state)
  if sweep then
    redis.call("HINCRBY", KEY.sweep(sweep), old, -1)
    redis.call("HINCRBY", KEY.sweep(sweep), state, 1)
  end
  -- A sweep has no shape, and holds no devices; those of a launcher's jobs are no use to others.
  if state == "running" and field(id, "preemptible") == "1" and field(id, "shape")
    and not field(id, "launcher") then
    redis.call("ZADD", KEY.preemptible(), field(id, "priority"), id)
  else
    redis.call("ZREM", KEY.preemptible(), id)
  end
  add_state_event(id, cap, state, reason)
end
