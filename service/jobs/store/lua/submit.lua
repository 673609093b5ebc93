-- Accept a job: record, indexes, idempotency key, place in the queue (or among its dependencies' dependents), event.
-- COST: the labels (32 at most) and the jobs needed (64 at most).
-- USES: core jobs queue
-- ARGV: limits: json, idem: str, body_hash: str, suffix: str, record: json, indexes: json, after: json
-- RETURNS: {"created"|"existing", id} | {"conflict", id} | {"dependency", id, its state or "missing"}

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
local function next_id()
  local time = math.max(wall_ms(), tonumber(redis.call("GET", KEY.sequence()) or 0) + 1)
  redis.call("SET", KEY.sequence(), whole(time))
  return "job_" .. base36(time) .. suffix
end

if idem ~= "" then
  local known = redis.call("GET", KEY.idempotency(idem))
  if known then
    known = cjson.decode(known)
    if redis.call("EXISTS", KEY.job(known.job)) == 1 then
      return { known.body_hash == body_hash and "existing" or "conflict", known.job }
    end
  end
end

local waits = {}
for _, needed in ipairs(after) do
  local state = field(needed, "state")
  if not state or state == "failed" or state == "cancelled" then
    return { "dependency", needed, state or "missing" }
  end
  if state ~= "succeeded" then
    waits[#waits + 1] = needed
  end
end

local id = next_id()
local fields = {}
for name, value in pairs(record) do
  fields[#fields + 1] = name
  fields[#fields + 1] = value
end
redis.call("HSET", KEY.job(id), "id", id, "state", "queued", "attempt", 0, "created_at", whole(wall_ms()),
  "queued_at", whole(now_ms()), "retries_used", 0, "lost_attempts", 0, unpack(fields))
redis.call("ZADD", KEY.jobs(), 0, id)
redis.call("ZADD", KEY.jobs_by("state:queued"), 0, id)
for _, index in ipairs(indexes) do
  redis.call("ZADD", KEY.jobs_by(index), 0, id)
end
for _, needed in ipairs(after) do
  redis.call("ZADD", KEY.job_dependents(needed), 0, id)
end
local reason
if #waits > 0 then
  redis.call("SADD", KEY.job_waits(id), unpack(waits))
  reason = dependency_reason(id)
  for _, needed in ipairs(waits) do
    redis.call("ZADD", KEY.job_dependents(needed), 1, id)
  end
  redis.call("HSET", KEY.job(id), "reason", reason)
else
  enqueue(id)
end
if idem ~= "" then
  local entry = cjson.encode({ job = id, body_hash = body_hash })
  redis.call("SET", KEY.idempotency(idem), entry, "PX", limits.idem_ttl_ms)
end
add_state_event(id, limits.stream_cap, "queued", reason)
return { "created", id }
