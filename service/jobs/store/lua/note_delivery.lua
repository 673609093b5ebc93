-- note_delivery
-- Keep what came of sending a delivery: it is over, or due again in again_ms (0: over). A webhook whose deliveries have
-- all failed for disable_ms is disabled.
-- USES: core
-- ARGV: webhook: str, delivery: str, text: str, again_ms: int, succeeded: int, disable_ms: int
-- RETURNS: 1 if the webhook is disabled from now on

local entry, is_of_job = redis.call("HGET", KEY.webhooks(), webhook), string.sub(webhook, 1, 4) == "job_"
if not entry and not is_of_job then
  return 0
end
local now, name = now_ms(), webhook .. ":" .. delivery
redis.call("SET", KEY.webhook_delivery(webhook, delivery), text, "XX", "KEEPTTL")
if again_ms > 0 then
  redis.call("ZADD", KEY.webhook_due(), "XX", whole(now + again_ms), name)
else
  redis.call("ZREM", KEY.webhook_due(), name)
end
if is_of_job then
  return 0
end
if succeeded == 1 then
  redis.call("HDEL", KEY.webhooks_failing(), webhook)
  return 0
end
redis.call("HSETNX", KEY.webhooks_failing(), webhook, whole(now))
if now - tonumber(redis.call("HGET", KEY.webhooks_failing(), webhook)) < disable_ms then
  return 0
end
local known = cjson.decode(entry)
if known.disabled_at ~= cjson.null then
  return 0
end
known.disabled_at = wall_ms() / 1000
redis.call("HSET", KEY.webhooks(), webhook, cjson.encode(known))
return 1
