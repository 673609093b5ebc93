-- make_deliveries
-- Turn one noted change into deliveries, for the webhooks that want it and for the job itself where its spec asks for
-- that, unless another process has done so.
-- COST: the webhooks that want it.
-- USES: core
-- ARGV: change: str, keep_ms: int, most: int, *pieces: str
-- (pieces: webhook or job, delivery, its JSON, webhook, ...)
-- RETURNS: 1 if this call made them

if redis.call("XDEL", KEY.webhook_changes(), change) == 0 then
  return 0
end
local now = now_ms()
for i = 1, #pieces, 3 do
  local webhook, delivery = pieces[i], pieces[i + 1]
  local is_of_job = string.sub(webhook, 1, 4) == "job_"
  if is_of_job or redis.call("HEXISTS", KEY.webhooks(), webhook) == 1 then
    redis.call("SET", KEY.webhook_delivery(webhook, delivery), pieces[i + 2], "PX", keep_ms)
    redis.call("ZADD", KEY.webhook_deliveries(webhook), now, delivery)
    redis.call("ZREMRANGEBYRANK", KEY.webhook_deliveries(webhook), 0, -most - 1)
    redis.call("ZADD", KEY.webhook_due(), now, webhook .. ":" .. delivery)
    if is_of_job then
      redis.call("PEXPIRE", KEY.webhook_deliveries(webhook), keep_ms)
    end
  end
end
return 1
