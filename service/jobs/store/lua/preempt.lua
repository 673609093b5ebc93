-- Ask running jobs to make room for a pending one: each ends its attempt with a checkpoint, and is queued again. Nothing
-- happens unless all of it is still so, and while devices of the pool are being freed for another job.
-- COST: the victims.
-- USES: core jobs queue device_hours fair_share devices counts sweeps ending
-- ARGV: limits: json, job_id: str, pool: str, victims: json
-- RETURNS: 1 when they were asked, else 0

local helped = redis.call("GET", KEY.made_room(pool))
if not redis.call("ZSCORE", KEY.pending(), job_id) or (helped and redis.call("ZSCORE", KEY.pending(), helped)) then
  return 0
end
local priority = tonumber(field(job_id, "priority"))
for _, victim in ipairs(victims) do
  local job = redis.call("HMGET", KEY.job(victim.id), "state", "attempt", "fault", "priority")
  local is_able = job[1] == "running" and tonumber(job[2]) == victim.attempt and not job[3]
  if not is_able or not redis.call("ZSCORE", KEY.preemptible(), victim.id) or tonumber(job[4]) >= priority then
    return 0
  end
end
for _, victim in ipairs(victims) do
  local fault = { type = "Preempted", rank = cjson.null, message = "preempted by " .. name_for(victim.id, job_id) }
  add_fault(victim.id, "preempted", cjson.encode(fault))
  redis.call("HSET", KEY.job(victim.id), "reason", "makes room for " .. name_for(victim.id, job_id))
end
redis.call("SET", KEY.made_room(pool), job_id, "PX", whole(limits.made_room_ms))
wake_placement()
return 1
