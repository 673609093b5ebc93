-- Begin a session of a key.
-- USES: core
-- ARGV: session: str, page: str, key_id: str, idle_ms: int, longest_ms: int
-- RETURNS: 1

local key = KEY.session(session)
redis.call("HSET", key, "key", key_id, "page", page, "ends", whole(wall_ms() + longest_ms))
redis.call("PEXPIRE", key, whole(math.min(idle_ms, longest_ms)))
return 1
