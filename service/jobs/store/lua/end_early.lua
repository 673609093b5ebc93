-- Keep which values of a sweep its rule has judged, and tell the jobs that stop by them: each ends as a success, with
-- what it has. Nothing happens if another call has judged meanwhile.
-- COST: the jobs that stop, 1,000 at most.
-- USES: core jobs sweeps
-- ARGV: sweep: str, before: int, judged: int, stopped: json
-- RETURNS: 1, or 0 where nothing happened

local known = redis.call("HMGET", KEY.sweep(sweep), "total", "judged")
if not known[1] or tonumber(known[2] or 0) ~= before then
  return 0
end
redis.call("HSET", KEY.sweep(sweep), "judged", whole(judged))
if judged >= redis.call("HLEN", KEY.sweep_values(sweep)) then
  redis.call("SREM", KEY.sweeps_to_judge(), sweep)
end
for _, each in ipairs(stopped) do
  local state = field(each.job, "state")
  if state == "queued" or state == "starting" or state == "running" then
    redis.call("HSET", KEY.job(each.job), "ends_early", cjson.encode({ step = each.step, reason = each.reason }))
    redis.call("HSET", KEY.job(each.job), "reason", each.reason)
  end
end
return 1
