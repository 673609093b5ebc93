-- Enter a key unless one with the admin scope exists.
-- COST: the keys, which only an admin makes.
-- USES: core
-- ARGV: key_id: str, entry: str
-- RETURNS: 1 when entered, else 0

for _, text in ipairs(redis.call("HVALS", KEY.api_keys())) do
  for _, scope in ipairs(cjson.decode(text).scopes) do
    if scope == "admin" then
      return 0
    end
  end
end
redis.call("HSET", KEY.api_keys(), key_id, entry)
return 1
