-- switch_account
-- Disable or enable a service account with all of its keys.
-- COST: the keys.
-- USES: core keys
-- ARGV: name: str, entry: str, disabled: int
-- RETURNS: 1

if redis.call("HEXISTS", KEY.accounts(), name) == 0 then
  return refuse("NOTFOUND", "there is no service account '" .. name .. "'")
end
redis.call("HSET", KEY.accounts(), name, entry)
for _, key_id in ipairs(keys_of_account(name)) do
  if disabled == 1 then
    redis.call("SADD", KEY.api_keys_disabled(), key_id)
  else
    redis.call("SREM", KEY.api_keys_disabled(), key_id)
  end
end
return 1
