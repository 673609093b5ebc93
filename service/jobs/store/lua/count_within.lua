-- count_within
-- Count what happens in a window of time, which begins with the first and after which the count is forgotten.
-- COST: constant.
-- USES: core
-- ARGV: counter: str, window_ms: int
-- RETURNS: how many there were in this window

local count = redis.call("INCR", counter)
if count == 1 then
  redis.call("PEXPIRE", counter, whole(window_ms))
end
return count
