-- Make a supervisor the owner of a part. Asking again is answered again; a second supervisor is refused.
-- COST: the hosts of the job.
-- USES: core jobs queue device_hours fair_share devices counts sweeps ending fencing
-- ARGV: limits: json, job_id: str, attempt: int, host: str, supervisor: str
-- RETURNS: {spec, placement, address of the leading host, the uploads that it may read, the jobs that it needs}

local now = now_ms()
local first_time = is_current(job_id, attempt, host, "starting")
local part = held_part(host, job_id, attempt)
local again = is_current(job_id, attempt, host, "running") and part and part.supervisor == supervisor
if not first_time and not again then
  return superseded(job_id, attempt, host)
end

local name = part_name(job_id, attempt, host)
if first_time then
  part.supervisor = supervisor
  hold(host, job_id, attempt, part)
  redis.call("HSET", KEY.job_parts(job_id), host, "running")
  redis.call("ZREM", KEY.outbox(), name)
  redis.call("HDEL", KEY.job(job_id), "lost", "avoid")
  local unclaimed = false
  for _, status in ipairs(redis.call("HVALS", KEY.job_parts(job_id))) do
    unclaimed = unclaimed or status == "starting"
  end
  if not unclaimed and field(job_id, "state") == "starting" then
    redis.call("HSETNX", KEY.job(job_id), "started_at", whole(wall_ms()))
    add_count(1, "trivet_attempts_started_total")
    observe("trivet_start_seconds", (now - part.placed_at) / 1000)
    set_state(job_id, limits.stream_cap, "running")
    note_for_exports(job_id)
  end
end
redis.call("ZADD", KEY.leases(), whole(now + limits.lease_ms), name)
local placement = field(job_id, "placement")
local leader = cjson.decode(placement)[1].host
local address = redis.call("HGET", KEY.host(leader), "address") or ""
return { field(job_id, "spec"), placement, address, files_of(job_id), cjson.decode(field(job_id, "after")) }
