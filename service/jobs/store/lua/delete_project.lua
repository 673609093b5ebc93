-- Forget a project that has no jobs, uploads, keys, accounts or webhooks; what was shared with it no longer is.
-- COST: the keys, accounts and webhooks, and the jobs that are shared with it.
-- USES: core jobs members sharing
-- ARGV: project: str
-- RETURNS: 1

if not project_exists(project) then
  return no_such_project(project)
elseif project == "default" then
  return refuse("CONFLICT", "the project default cannot be deleted")
end
local function count_in(hash)
  local count = 0
  for _, entry in ipairs(redis.call("HVALS", hash)) do
    count = count + (cjson.decode(entry).project == project and 1 or 0)
  end
  return count
end

local jobs, uploads = redis.call("ZCARD", KEY.jobs_by("project:" .. project)), redis.call("HLEN", KEY.uploads(project))
-- What stays would belong to a later project of this name, and webhooks would tell of its jobs.
local keys, accounts, webhooks = count_in(KEY.api_keys()), count_in(KEY.accounts()), count_in(KEY.webhooks())
if jobs + uploads + keys + accounts + webhooks > 0 then
  return refuse("CONFLICT", "project " .. project .. " has " .. jobs .. " jobs, " .. uploads .. " uploads, " .. keys
    .. " keys, " .. accounts .. " accounts and " .. webhooks .. " webhooks; delete and revoke them first")
end
local held = string.match(redis.call("HGET", KEY.uses(), project) or "", "^%S+ (%d+) ") or "0"
if held ~= "0" then
  return refuse("CONFLICT", "project " .. project .. " holds " .. held .. " devices of attempts that were lost, until their "
    .. "hosts say that these are gone")
end
for _, id in ipairs(redis.call("ZRANGE", KEY.jobs_by("visible:" .. project), 0, -1)) do
  stop_sharing(id, project)
end
redis.call("HDEL", KEY.projects(), project)
redis.call("HDEL", KEY.placement_quotas(), project)
redis.call("HDEL", KEY.webhook_secrets(), project)
redis.call("HDEL", KEY.weights(), project)
redis.call("HDEL", KEY.uses(), project)
redis.call("DEL", KEY.project_members(project), KEY.device_hours(project))
return 1
