-- A host says goodbye: no more work for it; its record stays while anything on it holds devices, and while it is
-- drained: that mark is an operator's, and must be there when the host comes back.
-- COST: constant.
-- USES: core device_hours fair_share devices
-- ARGV: limits: json, host: str
-- RETURNS: 1

if redis.call("EXISTS", KEY.host(host)) == 0 then
  return refuse("NOTFOUND", "there is no host " .. host)
end
if redis.call("EXISTS", KEY.host_parts(host)) == 1 or redis.call("HEXISTS", KEY.host(host), "draining") == 1 then
  redis.call("ZADD", KEY.hosts(), whole(now_ms()), host)
else
  forget_host(host)
end
return 1
