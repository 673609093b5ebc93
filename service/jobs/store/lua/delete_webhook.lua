-- delete_webhook
-- Forget a webhook and its deliveries; after the last one, changes are noted only of jobs whose specs ask for that.
-- COST: its deliveries, which are capped.
-- USES: core
-- ARGV: webhook: str
-- RETURNS: 1

if redis.call("HDEL", KEY.webhooks(), webhook) == 0 then
  return refuse("NOTFOUND", "there is no webhook " .. webhook)
end
for _, delivery in ipairs(redis.call("ZRANGE", KEY.webhook_deliveries(webhook), 0, -1)) do
  redis.call("DEL", KEY.webhook_delivery(webhook, delivery))
  redis.call("ZREM", KEY.webhook_due(), webhook .. ":" .. delivery)
end
redis.call("DEL", KEY.webhook_deliveries(webhook))
redis.call("HDEL", KEY.webhooks_failing(), webhook)
if redis.call("HLEN", KEY.webhooks()) == 0 then
  redis.call("DEL", KEY.webhooks_present())
end
return 1
