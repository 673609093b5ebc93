-- add_webhook
-- Keep a webhook; from now on changes of jobs' states are noted.
-- USES: core
-- ARGV: webhook: str, entry: str, most: int
-- RETURNS: 1

if redis.call("HLEN", KEY.webhooks()) >= most then
  return refuse("CONFLICT", "there are " .. most .. " webhooks, the most that are allowed; delete one first")
end
redis.call("HSET", KEY.webhooks(), webhook, entry)
redis.call("SET", KEY.webhooks_present(), "1")
return 1
