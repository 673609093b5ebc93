-- Sweeps and chains: a parent without devices, whose state follows from its jobs. Needs core, jobs.

local ENDS = { "succeeded", "failed", "cancelled" }
local LONGEST_GATHERED = 16384
local MOST_FOLLOWED = 20000

local function is_sweep(id)
  return redis.call("EXISTS", KEY.sweep(id)) == 1
end

local function jobs_of(sweep)
  return redis.call("ZRANGE", KEY.jobs_by("sweep:" .. sweep), 0, -1)
end

local function ended_jobs(sweep)
  local ended = 0
  for _, count in ipairs(redis.call("HMGET", KEY.sweep(sweep), unpack(ENDS))) do
    ended = ended + tonumber(count or 0)
  end
  return ended
end

local function tell_progress(sweep, cap)
  local done, total = ended_jobs(sweep), tonumber(redis.call("HGET", KEY.sweep(sweep), "total"))
  local progress = { done = done, total = total, unit = "jobs" }
  redis.call("HSET", KEY.job(sweep), "progress", cjson.encode(progress))
  progress.type, progress.time, progress.rank = "progress", wall_ms() / 1000, cjson.null
  add_event(sweep, cap, "progress", cjson.encode(progress))
  return done == total
end

-- The number at a dotted path of a result, nil where there is none.
local function number_at(result, path)
  for name in string.gmatch(path, "[^.]+") do
    if type(result) ~= "table" then
      return nil
    end
    result = result[name]
  end
  return type(result) == "number" and result or nil
end

-- Note a job that did better than those before it.
local function compare(sweep, id)
  local known = redis.call("HMGET", KEY.sweep(sweep), "metric", "mode", "best")
  local text = field(id, "result")
  if not known[1] or not text then
    return
  end
  local value = number_at(cjson.decode(text), known[1])
  local best = known[3] and cjson.decode(known[3]).value
  if value and (not best or (known[2] == "min" and value < best) or (known[2] == "max" and value > best)) then
    -- With all its digits, which cjson does not write: a job that did as well is no better.
    redis.call("HSET", KEY.sweep(sweep), "best", string.format('{"job":%s,"value":%.17g}', cjson.encode(id), value))
  end
end

-- Keep what the rule of a job's sweep follows among these types and events: the first value at each step, numbered in the
-- order of arrival.
local function note_followed(id, entries)
  local sweep = field(id, "sweep")
  local metric = sweep and redis.call("HGET", KEY.sweep(sweep), "follows")
  for i = 1, metric and #entries or 0, 2 do
    if entries[i] == "metric" and string.find(entries[i + 1], '"' .. metric .. '"', 1, true) then
      local event, values = cjson.decode(entries[i + 1]), KEY.sweep_values(sweep)
      local value, number = event.values[metric], redis.call("HLEN", values)
      if type(value) == "number" and number < MOST_FOLLOWED then
        local kept = string.format("%d %.17g", number, value)
        if redis.call("HSETNX", values, id .. ":" .. whole(event.step), kept) == 1 then
          redis.call("SADD", KEY.sweeps_to_judge(), sweep)
        end
      end
    end
  end
end

-- How a sweep ends whose jobs are all over: state, and the error of one that failed.
local function outcome_of_sweep(sweep)
  local counts = redis.call("HMGET", KEY.sweep(sweep), "total", "succeeded", "failed")
  if counts[1] == counts[2] then
    return "succeeded"
  elseif field(sweep, "state") == "cancelling" or tonumber(counts[3] or 0) == 0 then
    return "cancelled"
  end
  local message = counts[3] .. " of its " .. counts[1] .. " jobs failed"
  return "failed", cjson.encode({ type = "SweepFailed", rank = cjson.null, message = message })
end

-- The results of a chain's jobs become its own, by their names; in place of a long one stands the job that has it.
local function gather_results(chain)
  local found = {}
  for _, id in ipairs(jobs_of(chain)) do
    local result = field(id, "result") or "null"
    if #result > LONGEST_GATHERED then
      result = cjson.encode({ job = id })
    end
    found[#found + 1] = cjson.encode(cjson.decode(field(id, "parameters")).job) .. ":" .. result
  end
  redis.call("HSET", KEY.job(chain), "result", "{" .. table.concat(found, ",") .. "}")
end

-- A job of a sweep is queued again: a sweep that was over goes on.
local function reopen(sweep, cap)
  local state = field(sweep, "state")
  if state == "failed" or state == "cancelled" then
    redis.call("HDEL", KEY.job(sweep), "error", "ended_at")
    set_state(sweep, cap, "queued")
    set_state(sweep, cap, "running")
  end
  tell_progress(sweep, cap)
end
