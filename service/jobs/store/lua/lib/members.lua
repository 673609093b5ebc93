-- What the owner of a key is in the key's project. Needs core.

local RANK = { viewer = 1, submitter = 2, maintainer = 3 }

-- A role, "" for a stranger and for a service account that is disabled, or "any" where the key alone decides: an
-- operator's, and those of the default project, which whoever has a key of it belongs to. `entry` is the key as it is
-- stored.
local function role_of(entry)
  local key = cjson.decode(entry)
  if key.holder == "account" and redis.call("SISMEMBER", KEY.api_keys_disabled(), key.id) == 1 then
    return ""
  end
  local project = key.project
  if not project or project == cjson.null or project == "default" then
    return "any"
  end
  return redis.call("HGET", KEY.project_members(project), key.name) or ""
end

local function project_exists(name)
  return name == "default" or redis.call("HEXISTS", KEY.projects(), name) == 1
end

local function no_such_project(name)
  return refuse("NOTFOUND", "there is no project " .. name)
end
