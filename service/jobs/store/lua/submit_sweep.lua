-- Accept a sweep or a chain: its parent, which runs until all its jobs are over and holds no devices, and its jobs. Those
-- of a chain come behind the ones that they need (`links`), and name each other by what stands in for ids (`stand_in`).
-- COST: 1,000 jobs at most, and for each its labels (32 at most) and the jobs needed (64 at most).
-- USES: core jobs queue counts uploads quotas submission sweeps
-- ARGV: limits: json, parent: json, children: json, asked: json
-- RETURNS: {"created"|"existing", id, "", 0}, or why nothing was written, as submit.lua says it, and because of which
-- job, 0 for the parent

local outcome, judged = outcome_of(parent), 0
while outcome[1] == "created" and judged < #children do
  judged = judged + 1
  outcome = outcome_of(children[judged])
end
if outcome[1] ~= "created" then
  outcome[4] = judged
  return outcome
end

local sweep = write_job(parent, limits)
redis.call("HSET", KEY.sweep(sweep), "total", #children, "queued", #children)
for name, value in pairs(asked) do -- which job is best, and the rule that stops some
  redis.call("HSET", KEY.sweep(sweep), name, value)
end
add_state_event(sweep, limits.stream_cap, "queued")
set_state(sweep, limits.stream_cap, "running")
tell_progress(sweep, limits.stream_cap)
local ids = {}
for _, child in ipairs(children) do
  if child.stand_in then
    child.id = next_id(child.suffix)
    ids[child.stand_in] = child.id
    name_others(child, ids)
  end
  child.record.sweep = sweep
  child.record.indexes = string.gsub(child.record.indexes, "%]$", ',"of_a_sweep","sweep:' .. sweep .. '"]')
  child.indexes[#child.indexes + 1] = "of_a_sweep"
  child.indexes[#child.indexes + 1] = "sweep:" .. sweep
  accept(child, limits)
end
return { "created", sweep, "", 0 }
