-- How long the job that has waited longest for devices has waited, in ms; 0 when none waits.
-- COST: the priorities, 201 at most: within one, the first is the oldest.
-- USES: core jobs queue
-- RETURNS: ms

local now, longest = now_ms(), 0
local first = first_in(KEY.pending(), "-inf", "+inf")
while first do
  local class = math.floor(first.score / CLASS) * CLASS
  longest = math.max(longest, now - (first.score - class))
  first = first_in(KEY.pending(), whole(class + CLASS), "+inf")
end
return longest
