-- Enter a key unless an operator's exists: one with the admin scope, of no project, and that has not expired.
-- COST: the keys, which only an admin makes.
-- USES: core keys
-- ARGV: key_id: str, entry: str
-- RETURNS: 1 when entered, else 0

for _, text in ipairs(redis.call("HVALS", KEY.api_keys())) do
  local key = cjson.decode(text)
  for _, scope in ipairs(key.scopes) do
    if scope == "admin" and (key.project or cjson.null) == cjson.null and not expired(key) then
      return 0
    end
  end
end
redis.call("HSET", KEY.api_keys(), key_id, entry)
return 1
