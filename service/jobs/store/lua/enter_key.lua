-- Enter a key, and make its owner a member of its project as far as that is needed. The name of a service account is
-- that of its own keys alone.
-- COST: constant.
-- USES: core members
-- ARGV: key_id: str, entry: str, project: str, owner: str, role: str, holder: str
-- RETURNS: 1

local account = redis.call("HGET", KEY.accounts(), owner)
if account and holder ~= "account" then
  return refuse("CONFLICT", "'" .. owner .. "' is a service account; its keys are made with trivet accounts key")
elseif holder == "account" and not account then
  return refuse("NOTFOUND", "there is no service account '" .. owner .. "'")
elseif account and cjson.decode(account).disabled then
  return refuse("CONFLICT", "the service account '" .. owner .. "' is disabled; enable it first")
end
if project ~= "" and not project_exists(project) then
  return no_such_project(project)
end
if project ~= "" and project ~= "default" then
  local present = redis.call("HGET", KEY.project_members(project), owner)
  if present and RANK[present] < RANK[role] then
    return refuse("CONFLICT", owner .. " is a " .. present .. " of project " .. project .. "; make it a " .. role
      .. " there first, or the key one for a " .. present)
  end
  redis.call("HSETNX", KEY.project_members(project), owner, role)
end
redis.call("HSET", KEY.api_keys(), key_id, entry)
return 1
