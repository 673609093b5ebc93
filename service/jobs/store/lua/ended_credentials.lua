-- Which credentials no longer admit anybody: their key was revoked, or their session is over.
-- USES: core
-- ARGV: *credentials: str
-- RETURNS: those of the given ones, each a key's id, or a key's id, a colon and a session

local ended = {}
for _, credential in ipairs(credentials) do
  local key_id, session = string.match(credential, "^([^:]*):?(.*)$")
  local revoked = redis.call("HEXISTS", KEY.api_keys(), key_id) == 0
  if revoked or (session ~= "" and redis.call("EXISTS", KEY.session(session)) == 0) then
    ended[#ended + 1] = credential
  end
end
return ended
