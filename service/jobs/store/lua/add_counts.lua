-- Add what a process counted by itself to the counts of all.
-- COST: the counts given, of which there are as many as there are metrics and values of their labels.
-- USES: core
-- ARGV: counted: json
-- RETURNS: how many

local added = 0
for name, by in pairs(counted) do
  redis.call("HINCRBYFLOAT", KEY.counts(), name, string.format("%.17g", by))
  added = added + 1
end
return added
