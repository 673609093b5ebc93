-- Count a refused sign-in of an address; the count is forgotten some time after the first one.
-- COST: constant.
-- USES: core
-- ARGV: address: str, window_ms: int
-- RETURNS: how many there were in this window

local key = KEY.sign_ins(address)
local count = redis.call("INCR", key)
if count == 1 then
  redis.call("PEXPIRE", key, whole(window_ms))
end
return count
