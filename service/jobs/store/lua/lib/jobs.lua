-- A job's record: its view, with why it waits, its events, its state. Needs core.

local function field(id, name)
  return redis.call("HGET", KEY.job(id), name) or nil
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

local capacity_seen

-- Why a pending job was not placed yet, from what placement last saw of the fleet (see place.lua).
local function waiting_reason(id, shape)
  capacity_seen = capacity_seen or redis.call("GET", KEY.capacity()) or "{}"
  local capacity = type(capacity_seen) == "string" and cjson.decode(capacity_seen) or capacity_seen
  capacity_seen = capacity
  local device, ranks, hosts = string.match(shape, "^(%a+):(%d+):(%d+)$")
  ranks, hosts = tonumber(ranks), tonumber(hosts)
  local pool = device == "auto" and capacity.auto or device
  local seen = capacity[pool]
  if not seen then
    return "waits for devices"
  end
  local barrier = seen.barrier
  if barrier and barrier.id ~= id and redis.call("ZSCORE", KEY.pending(), barrier.id) then
    local score = tonumber(redis.call("ZSCORE", KEY.pending(), id))
    if score > barrier.score or (score == barrier.score and id > barrier.id) then
      return "is held back by job " .. barrier.id .. ", which has waited too long to be overtaken"
    end
  end
  local where = hosts == 1 and "one host" or "at most " .. hosts .. " hosts"
  local needs = ranks .. " free " .. pool .. " devices on " .. where
  local together = seen.together
  if ranks <= (together[math.min(hosts, #together)] or 0) then
    local avoid = field(id, "avoid")
    return "waits for " .. needs .. (avoid and ", other than host " .. avoid .. ", where it did not start" or "")
  end
  local remedy = ""
  for wider, held in ipairs(together) do
    if held >= ranks then
      remedy = "; max_hosts of " .. wider .. " would do"
      break
    end
  end
  return "no hosts that take work have " .. needs .. ", even when idle" .. remedy
end

-- The record as a flat list of fields and values, without the one that is named; a pending job says why it was not
-- placed yet.
local function view(id, without)
  local record = {}
  if without then
    for _, name in ipairs(redis.call("HKEYS", KEY.job(id))) do
      if name ~= without then
        record[#record + 1] = name
        record[#record + 1] = field(id, name)
      end
    end
  else
    record = redis.call("HGETALL", KEY.job(id))
  end
  local shape = field(id, "shape")
  if shape and redis.call("ZSCORE", KEY.pending(), id) then
    record[#record + 1] = "waiting"
    record[#record + 1] = waiting_reason(id, shape)
  end
  return record
end

local function add_event(id, cap, kind, data)
  redis.call("XADD", KEY.job_events(id), "MAXLEN", "~", cap, "*", "t", kind, "d", data)
end

local function add_state_event(id, cap, state, reason)
  local event = {
    type = "state", time = wall_ms() / 1000, rank = cjson.null,
    state = state, attempt = tonumber(field(id, "attempt")), reason = reason,
  }
  add_event(id, cap, "state", cjson.encode(event))
end

-- Hash, index and event of a state belong together; this is the only place that writes any of them.
local function set_state(id, cap, state, reason)
  local old = field(id, "state")
  assert(MOVES[old][state], "job " .. id .. " cannot go from " .. old .. " to " .. state)
  redis.call("HSET", KEY.job(id), "state", state)
  if reason then
    redis.call("HSET", KEY.job(id), "reason", reason)
  else
    redis.call("HDEL", KEY.job(id), "reason")
  end
  redis.call("ZREM", KEY.jobs_by("state:" .. old), id)
  redis.call("ZADD", KEY.jobs_by("state:" .. state), 0, id)
  add_state_event(id, cap, state, reason)
end
