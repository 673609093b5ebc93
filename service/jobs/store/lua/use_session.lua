-- Find the key of a session that a page speaks for, and let the session live on for idle_ms from now, until its end by
-- the time of day; with 0 it ends when it would have. The page proves itself by its secret, or by a ticket that it was given for this path.
-- USES: core keys members
-- ARGV: session: str, page: str, ticket: str, path: str, idle_ms: int
-- RETURNS: the key's entry, its last use and its owner's role (see lib/members.lua); nothing when
-- the session, its key or the proof is not there

local held = redis.call("HMGET", KEY.session(session), "key", "page", "ends")
if not held[1] then
  return {}
end
local proved = held[2] == page or (ticket ~= "" and redis.call("GET", KEY.session_ticket(session, ticket)) == path)
if not proved then
  return {}
end
local found = valid_entry(held[1])
local left = tonumber(held[3]) - wall_ms()
if not found or left <= 0 then
  redis.call("DEL", KEY.session(session))
  return {}
end
if idle_ms > 0 then
  redis.call("PEXPIRE", KEY.session(session), whole(math.min(idle_ms, left)))
end
return { found, redis.call("HGET", KEY.api_keys_used(), held[1]) or "", role_of(found) }
