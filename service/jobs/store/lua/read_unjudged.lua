-- A sweep with values that its rule has not judged, with all of its values and jobs; nothing where there is none.
-- COST: the jobs of one sweep, 1,000 at most, and the values that its rule follows, 20,000 at most.
-- USES: core jobs sweeps
-- ARGV:
-- RETURNS: {} | {sweep, rule, number of values judged, {job:step, number and value, …},
--   {{job, state, step at which it was told to end}, …}}

local sweep = redis.call("SRANDMEMBER", KEY.sweeps_to_judge())
if not sweep then
  return {}
end
local rule, judged = unpack(redis.call("HMGET", KEY.sweep(sweep), "rule", "judged"))
local jobs = {}
for _, id in ipairs(jobs_of(sweep)) do
  local state, told = unpack(redis.call("HMGET", KEY.job(id), "state", "ends_early"))
  jobs[#jobs + 1] = { id, state, told and whole(cjson.decode(told).step) or "" }
end
return { sweep, rule, judged or "0", redis.call("HGETALL", KEY.sweep_values(sweep)), jobs }
