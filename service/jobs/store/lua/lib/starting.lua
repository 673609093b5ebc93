-- How an attempt begins: its job leaves the queue, and holds devices. Needs core, jobs, queue, device_hours, fair_share,
-- devices, counts, and `limits` among the script's arguments.

-- No number is given twice, also where a lost attempt was taken up again and the one in its stead withdrawn.
local function next_attempt(id)
  local job = redis.call("HMGET", KEY.job(id), "attempt", "last_attempt")
  local attempt = math.max(tonumber(job[1]), tonumber(job[2] or 0)) + 1
  redis.call("HSET", KEY.job(id), "attempt", attempt, "last_attempt", attempt)
  return attempt
end

local MOST_ATTEMPTS = 16

-- Note, after what computed earlier attempts, what computes this one: the leading host as it last reported itself.
local function note_computer(id, attempt, leader)
  local host = redis.call("HMGET", KEY.host(leader.host), "versions", "cuda", "threads")
  local cuda, threads, names = cjson.decode(host[2] or "[]"), cjson.decode(host[3] or "{}"), nil
  for _, device in ipairs(leader.pool == "cuda" and leader.devices or {}) do
    names = names or {}
    names[#names + 1] = cuda[device + 1]
  end
  local all = cjson.decode(field(id, "computed_by") or "[]")
  all[#all + 1] = {
    attempt = attempt, host = leader.host, pool = leader.pool, devices = names, threads = threads[leader.pool],
    versions = cjson.decode(host[1] or "{}"),
  }
  if #all > MOST_ATTEMPTS then
    table.remove(all, 1)
  end
  redis.call("HSET", KEY.job(id), "computed_by", cjson.encode(all), "versions", host[1] or "{}")
end

-- Begin an attempt of a pending job on these parts, {host, devices, pool}: the first host leads. Returns its number.
local function begin_attempt(id, parts, now)
  dequeue(id)
  local attempt, project = next_attempt(id), project_of(id)
  redis.call("DEL", KEY.job_parts(id), KEY.job_batches(id))
  for _, part in ipairs(parts) do
    take(part.host, id, attempt, { pool = part.pool, devices = part.devices, placed_at = now, project = project })
    redis.call("HSET", KEY.job_parts(id), part.host, "starting")
    redis.call("ZADD", KEY.leases(), whole(now + limits.starting_lease_ms), part_name(id, attempt, part.host))
  end
  redis.call("HSET", KEY.job(id), "placement", cjson.encode(parts))
  note_computer(id, attempt, parts[1])
  add_count(1, "trivet_attempts_placed_total")
  observe("trivet_queue_time_seconds", (now - tonumber(field(id, "queued_at"))) / 1000)
  set_state(id, limits.stream_cap, "starting")
  return attempt
end
