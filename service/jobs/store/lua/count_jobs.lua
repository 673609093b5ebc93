-- How many jobs in each state match a filter and contain the text, of those after the cursor.
-- COST: `scan` jobs looked at.
-- USES: core jobs listing
-- ARGV: filters: json, text: str, cursor: str, scan: int
-- RETURNS: {last id looked at when there may be more, else "", state, jobs, state, jobs, …}

local counts = {}
local last = walk_newest(filters, text, cursor, scan, function() return false end, function(id)
  local state = field(id, "state")
  counts[state] = (counts[state] or 0) + 1
end)
local answer = { last }
for state, jobs in pairs(counts) do
  answer[#answer + 1] = state
  answer[#answer + 1] = jobs
end
return answer
