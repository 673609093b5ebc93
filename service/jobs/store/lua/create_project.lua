-- Keep a new project, and those of its quotas that placement keeps where it reads them.
-- COST: constant.
-- USES: core
-- ARGV: project: str, entry: str, placement_quotas: str
-- RETURNS: 1; 0 where there is one of this name

if redis.call("HSETNX", KEY.projects(), project, entry) == 0 then
  return 0
end
if placement_quotas ~= "" then
  redis.call("HSET", KEY.placement_quotas(), project, placement_quotas)
end
return 1
