-- due_deliveries
-- Take deliveries that are to be sent now. Each goes to one caller, and comes back after hold_ms unless it was ended.
-- COST: most.
-- USES: core
-- ARGV: most: int, hold_ms: int
-- RETURNS: webhook, its JSON (empty of what a job's spec asks for: then it is the job), the delivery's JSON, webhook, ...

local now, found = now_ms(), {}
for _, name in ipairs(redis.call("ZRANGE", KEY.webhook_due(), "-inf", whole(now), "BYSCORE", "LIMIT", 0, most)) do
  local webhook, delivery = string.match(name, "^([^:]+):(.+)$")
  local entry = string.sub(webhook, 1, 4) == "job_" and "" or redis.call("HGET", KEY.webhooks(), webhook)
  local text = redis.call("GET", KEY.webhook_delivery(webhook, delivery))
  if entry and text then
    redis.call("ZADD", KEY.webhook_due(), whole(now + hold_ms), name)
    found[#found + 1], found[#found + 2], found[#found + 3] = webhook, entry, text
  else
    redis.call("ZREM", KEY.webhook_due(), name)
  end
end
return found
