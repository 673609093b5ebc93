-- How jobs are accepted. Needs core, jobs, queue, uploads, quotas, counts.

local function base36(number)
  local digits, text = "0123456789abcdefghijklmnopqrstuvwxyz", ""
  for _ = 1, 9 do
    local digit = number % 36
    text = string.sub(digits, digit + 1, digit + 1) .. text
    number = math.floor(number / 36)
  end
  return text
end

-- Strictly increasing, so that the order of ids is the order of submission even within one millisecond.
local function next_id(suffix)
  local time = math.max(wall_ms(), tonumber(redis.call("GET", KEY.sequence()) or 0) + 1)
  redis.call("SET", KEY.sequence(), whole(time))
  return "job_" .. base36(time) .. suffix
end

local BADLY = { failed = true, cancelled = true }

-- Whether a job is in a list; one that was written before there were such lists has none.
local function is_listed(list, id)
  for _, listed in ipairs(list or {}) do
    if listed == id then
      return true
    end
  end
  return false
end

-- What becomes of a job that is to be accepted: see submit.lua. The id of one that is to be created is empty.
local function outcome_of(entry)
  if entry.idem ~= "" then
    local known = redis.call("GET", KEY.idempotency(entry.idem))
    if known then
      known = cjson.decode(known)
      if redis.call("EXISTS", KEY.job(known.job)) == 1 then
        return { known.body_hash == entry.body_hash and "existing" or "conflict", known.job, "" }
      end
    end
  end
  local project = entry.record.project or "default"
  for _, needed in ipairs(entry.after) do
    local state = is_visible(needed, project) and field(needed, "state")
    if not state or (BADLY[state] and not is_listed(entry.weights, needed)) then
      return { "dependency", needed, state or "missing" }
    end
  end
  for _, file in ipairs(entry.files) do
    if not has_upload(project, file) then
      return { "upload", file, "" }
    end
  end
  local quota, most = over_quota(project, entry.record)
  if quota then
    return { "quota", quota, cjson.encode({ project = project, most = most }) }
  end
  return { "created", "", "" }
end

-- Enter a job among the dependents of those that it needs. Returns the ones that it waits for: of those that have ended
-- badly it takes weights that they have left.
local function depend(id, after)
  local waits = {}
  for _, needed in ipairs(after) do
    local state = field(needed, "state")
    local is_open = state ~= "succeeded" and not BADLY[state]
    redis.call("ZADD", KEY.job_dependents(needed), is_open and 1 or 0, id)
    if is_open then
      waits[#waits + 1] = needed
    end
  end
  if #waits > 0 then
    redis.call("SADD", KEY.job_waits(id), unpack(waits))
  end
  return waits
end

local function write_record(id, record)
  local fields = {}
  for name, value in pairs(record) do
    fields[#fields + 1] = name
    fields[#fields + 1] = value
  end
  redis.call("HSET", KEY.job(id), "id", id, "state", "queued", "attempt", 0, "created_at", whole(wall_ms()),
    "queued_at", whole(now_ms()), "retries_used", 0, "lost_attempts", 0, unpack(fields))
end

-- Write a job with its indexes and its idempotency key. Returns its id.
local function write_job(entry, limits)
  local id = entry.id or next_id(entry.suffix)
  write_record(id, entry.record)
  redis.call("ZADD", KEY.jobs(), 0, id)
  enter_state(id, "queued")
  for _, index in ipairs(entry.indexes) do
    redis.call("ZADD", KEY.jobs_by(index), 0, id)
  end
  for _, file in ipairs(entry.files) do
    use_upload(entry.record.project, file)
  end
  if entry.idem ~= "" then
    local known = cjson.encode({ job = id, body_hash = entry.body_hash })
    redis.call("SET", KEY.idempotency(entry.idem), known, "PX", limits.idem_ttl_ms)
  end
  add_count(1, "trivet_jobs_submitted_total", entry.record.kind)
  return id
end

-- Put the ids of a chain's jobs, which come first, in place of what stands in for them.
local function name_others(entry, ids)
  for _, stand_in in ipairs(entry.links) do
    entry.after[#entry.after + 1] = ids[stand_in]
  end
  for _, name in ipairs({ "spec", "after", "weights", "indexes" }) do
    entry.record[name] = string.gsub(entry.record[name], "job_zzzzzzzzz%d+", ids)
  end
  for i, index in ipairs(entry.indexes) do
    entry.indexes[i] = string.gsub(index, "job_zzzzzzzzz%d+", ids)
  end
end

-- Write a job and queue it, or let it wait for those that it needs; none of them has ended badly. Returns its id.
local function accept(entry, limits)
  local id, reason = write_job(entry, limits), nil
  if #depend(id, entry.after) > 0 then
    reason = dependency_reason(id)
    redis.call("HSET", KEY.job(id), "reason", reason)
  else
    enqueue(id)
  end
  add_state_event(id, limits.stream_cap, "queued", reason)
  return id
end
