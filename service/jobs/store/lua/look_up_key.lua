-- What a secret is compared with; the work and the round trips are the same whether the key exists or not.
-- USES: core members
-- ARGV: key_id: str
-- RETURNS: the key's entry, its last use, the pepper, and its owner's role (see lib/members.lua); empty strings for what
-- there is not

local found = redis.call("HGET", KEY.api_keys(), key_id)
local used = redis.call("HGET", KEY.api_keys_used(), key_id)
return { found or "", used or "", redis.call("GET", KEY.pepper()) or "", found and role_of(found) or "" }
