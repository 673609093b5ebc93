-- Stop ("1") or start ("0") giving work to a host; what runs there goes on.
-- USES: core
-- ARGV: host: str, draining: str
-- RETURNS: 1

if redis.call("EXISTS", KEY.host(host)) == 0 then
  return refuse("NOTFOUND", "there is no host " .. host)
end
if draining == "1" then
  redis.call("HSET", KEY.host(host), "draining", 1)
else
  redis.call("HDEL", KEY.host(host), "draining")
end
unsettle()
return 1
