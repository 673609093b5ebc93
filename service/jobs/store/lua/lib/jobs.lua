-- A job's record: its view, its events, its state. Needs core.

local function field(id, name)
  return redis.call("HGET", KEY.job(id), name) or nil
end

local function no_such_job(id)
  return refuse("NOTFOUND", "there is no job " .. id)
end

-- The record as a flat list of fields and values; a pending job says why it was not placed yet.
local function view(id)
  local record = redis.call("HGETALL", KEY.job(id))
  local shape = field(id, "shape")
  if shape and redis.call("ZSCORE", KEY.pending(), id) then
    record[#record + 1] = "waiting"
    record[#record + 1] = redis.call("HGET", KEY.shapes(), shape) or ""
  end
  return record
end

local function add_event(id, cap, kind, data)
  redis.call("XADD", KEY.job_events(id), "MAXLEN", "~", cap, "*", "t", kind, "d", data)
end

local function add_state_event(id, cap, state, now, reason)
  local event = {
    type = "state", time = now / 1000, rank = cjson.null,
    state = state, attempt = tonumber(field(id, "attempt")), reason = reason,
  }
  add_event(id, cap, "state", cjson.encode(event))
end

-- Hash, index and event of a state belong together; this is the only place that writes any of them.
local function set_state(id, cap, state, now, reason)
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
  add_state_event(id, cap, state, now, reason)
end
