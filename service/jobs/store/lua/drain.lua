-- Stop ("1") or start ("0") giving work to a host; what runs there goes on. A start also clears what is held against it.
-- COST: constant.
-- USES: core device_hours fair_share devices counts health
-- ARGV: limits: json, host: str, draining: str
-- RETURNS: 1

if redis.call("EXISTS", KEY.host(host)) == 0 then
  return refuse("NOTFOUND", "there is no host " .. host)
end
if draining == "1" then
  redis.call("HSET", KEY.host(host), "draining", 1)
else
  redis.call("HDEL", KEY.host(host), "draining")
  clear_failures(host)
end
wake_placement()
return 1
