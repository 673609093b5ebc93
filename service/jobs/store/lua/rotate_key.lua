-- rotate_key
-- Enter the successor of a key, and the key as it is from now on.
-- COST: constant.
-- USES: core
-- ARGV: key_id: str, known: str, entry: str, successor_id: str, successor: str
-- RETURNS: 1

local found = redis.call("HGET", KEY.api_keys(), key_id)
if not found then
  return refuse("NOTFOUND", "there is no key " .. key_id)
elseif found ~= known then
  return refuse("CONFLICT", "key " .. key_id .. " was changed at the same moment; look at it, and try again")
end
if redis.call("SISMEMBER", KEY.api_keys_disabled(), key_id) == 1 then
  return refuse("CONFLICT", "the service account of key " .. key_id .. " is disabled; enable it first")
end
redis.call("HSET", KEY.api_keys(), key_id, entry, successor_id, successor)
return 1
