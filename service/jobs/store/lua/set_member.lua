-- Give the owner of keys a role in a project; without a role, take it away: its keys there admit nobody from now on.
-- COST: constant.
-- USES: core members
-- ARGV: project: str, owner: str, role: str
-- RETURNS: 1

if not project_exists(project) then
  return no_such_project(project)
elseif project == "default" then
  return refuse("CONFLICT", "whoever has a key of the project default is a member of it; create or revoke keys instead")
elseif role ~= "" then
  redis.call("HSET", KEY.project_members(project), owner, role)
elseif redis.call("HDEL", KEY.project_members(project), owner) == 0 then
  return refuse("NOTFOUND", owner .. " is no member of project " .. project)
end
return 1
