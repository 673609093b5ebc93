-- delete_account
-- Delete a service account, revoke its keys and end its membership.
-- COST: the keys.
-- USES: core keys
-- ARGV: name: str
-- RETURNS: how many keys were revoked

local account = redis.call("HGET", KEY.accounts(), name)
if not account then
  return refuse("NOTFOUND", "there is no service account '" .. name .. "'")
end
redis.call("HDEL", KEY.accounts(), name)
local project = cjson.decode(account).project
if project and project ~= cjson.null then
  redis.call("HDEL", KEY.project_members(project), name)
end
local found = keys_of_account(name)
for _, key_id in ipairs(found) do
  redis.call("HDEL", KEY.api_keys(), key_id)
  redis.call("HDEL", KEY.api_keys_used(), key_id)
  redis.call("SREM", KEY.api_keys_disabled(), key_id)
end
return #found
