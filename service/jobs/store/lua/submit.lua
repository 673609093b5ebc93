-- Accept jobs, all or none: record, indexes, idempotency key, place in the queue (or among its dependencies'
-- dependents), event.
-- COST: 1,000 jobs at most, and for each its labels (32 at most) and the jobs needed (64 at most).
-- USES: core jobs queue uploads quotas counts submission
-- ARGV: limits: json, entries: json
-- RETURNS: for each job {"created"|"existing", id, ""}; where one of them is refused, nothing was written and it is
-- {"conflict", id, ""}, {"dependency", id, its state or "missing"} or {"upload", file, ""} for one that is not there, or
-- {"quota", its name, {project, most}}. A single job's record follows those three.

local outcomes, is_refused = {}, false
for i, entry in ipairs(entries) do
  outcomes[i] = outcome_of(entry)
  is_refused = is_refused or (outcomes[i][1] ~= "created" and outcomes[i][1] ~= "existing")
end
if is_refused then
  return outcomes
end
for i, entry in ipairs(entries) do
  if outcomes[i][1] == "created" then
    outcomes[i][2] = accept(entry, limits)
  end
end
if #entries == 1 then
  outcomes[1][4] = view(outcomes[1][2])
end
return outcomes
