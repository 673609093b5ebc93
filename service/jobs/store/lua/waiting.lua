-- The records of some queued jobs, without their specs, with why they wait; those that are no longer queued are left out.
-- COST: the jobs named.
-- USES: core jobs
-- ARGV: *ids: str
-- RETURNS: {flat fields and values, …}

local views = {}
for _, id in ipairs(ids) do
  if field(id, "state") == "queued" then
    views[#views + 1] = brief_view(id)
  end
end
return views
