-- Keep a project with changed quotas, and those that placement keeps where it reads them.
-- COST: constant.
-- USES: core
-- ARGV: project: str, entry: str, placement_quotas: str
-- RETURNS: 1

redis.call("HSET", KEY.projects(), project, entry)
if placement_quotas == "" then
  redis.call("HDEL", KEY.placement_quotas(), project)
else
  redis.call("HSET", KEY.placement_quotas(), project, placement_quotas)
end
wake_placement()
return 1
