-- Forget a project that has no jobs, no uploads and no keys; what was shared with it no longer is.
-- COST: the keys, and the jobs that are shared with it.
-- USES: core jobs members sharing
-- ARGV: project: str
-- RETURNS: 1

if not project_exists(project) then
  return no_such_project(project)
elseif project == "default" then
  return refuse("CONFLICT", "the project default cannot be deleted")
end
local jobs, keys = redis.call("ZCARD", KEY.jobs_by("project:" .. project)), 0
local uploads = redis.call("HLEN", KEY.uploads(project))
for _, entry in ipairs(redis.call("HVALS", KEY.api_keys())) do
  if cjson.decode(entry).project == project then
    keys = keys + 1
  end
end
if jobs + keys + uploads > 0 then
  return refuse("CONFLICT", "project " .. project .. " has " .. jobs .. " jobs, " .. uploads .. " uploads and " .. keys
    .. " keys; delete and revoke them first")
end
for _, id in ipairs(redis.call("ZRANGE", KEY.jobs_by("visible:" .. project), 0, -1)) do
  stop_sharing(id, project)
end
redis.call("HDEL", KEY.projects(), project)
redis.call("HDEL", KEY.placement_quotas(), project)
redis.call("HDEL", KEY.webhook_secrets(), project)
redis.call("DEL", KEY.project_members(project), KEY.device_hours(project))
return 1
