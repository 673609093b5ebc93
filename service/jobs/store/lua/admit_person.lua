-- admit_person
-- Enter what somebody who signed in through the provider may do, in place of what it was, as a key and as a member of
-- the project. A name stays with the person who had it first: jobs are owned by names.
-- COST: the keys and the persons.
-- USES: core members
-- ARGV: key_id: str, entry: str, project: str, owner: str, role: str
-- RETURNS: 1

if project ~= "" and not project_exists(project) then
  return no_such_project(project)
end
if redis.call("HEXISTS", KEY.accounts(), owner) == 1 then
  return refuse("CONFLICT", "'" .. owner .. "' is the name of a service account")
end
for _, text in ipairs(redis.call("HVALS", KEY.api_keys())) do
  local key = cjson.decode(text)
  if key.holder == "person" and key.name == owner and key.id ~= key_id then
    return refuse("CONFLICT", "'" .. owner .. "' was another person's name; an admin may revoke " .. key.id .. " to free it")
  end
end
local former = redis.call("HGET", KEY.api_keys(), key_id)
local left = former and cjson.decode(former).project
if left and left ~= cjson.null and left ~= project then
  redis.call("HDEL", KEY.project_members(left), cjson.decode(former).name)
end
if project ~= "" and project ~= "default" then
  redis.call("HSET", KEY.project_members(project), owner, role)
end
redis.call("HSET", KEY.api_keys(), key_id, entry)
return 1
