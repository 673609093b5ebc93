-- create_account
-- Enter a service account under a name that is no key's yet: whoever had such a key would own the account's jobs.
-- COST: the keys.
-- USES: core members
-- ARGV: name: str, entry: str, project: str
-- RETURNS: 1

if project ~= "" and not project_exists(project) then
  return no_such_project(project)
elseif redis.call("HEXISTS", KEY.accounts(), name) == 1 then
  return refuse("CONFLICT", "there is a service account '" .. name .. "' already")
end
for _, text in ipairs(redis.call("HVALS", KEY.api_keys())) do
  local key = cjson.decode(text)
  if key.name == name then
    return refuse("CONFLICT", "'" .. name .. "' is the name of key " .. key.id .. "; an account needs one of its own")
  end
end
redis.call("HSET", KEY.accounts(), name, entry)
return 1
