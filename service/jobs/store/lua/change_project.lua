-- Keep a changed project, and those of its quotas that placement keeps where it reads them; nothing where it is no longer
-- what it was `before`, as it is stored (empty for the default one that was never changed).
-- COST: constant.
-- USES: core members
-- ARGV: project: str, before: str, entry: str, placement_quotas: str
-- RETURNS: 1; 0 where somebody else has changed it

if not project_exists(project) then
  return no_such_project(project)
elseif (redis.call("HGET", KEY.projects(), project) or "") ~= before then
  return 0
end
redis.call("HSET", KEY.projects(), project, entry)
if placement_quotas == "" then
  redis.call("HDEL", KEY.placement_quotas(), project)
else
  redis.call("HSET", KEY.placement_quotas(), project, placement_quotas)
end
wake_placement()
return 1
