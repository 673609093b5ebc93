-- Which credentials no longer admit anybody: their key was revoked or has expired, its owner is no longer a member of its
-- project, or their session is over.
-- USES: core keys members
-- ARGV: *credentials: str
-- RETURNS: those of the given ones, each a key's id, or a key's id, a colon and a session

local ended = {}
for _, credential in ipairs(credentials) do
  local key_id, session = string.match(credential, "^([^:]*):?(.*)$")
  local entry = valid_entry(key_id)
  local is_over = not entry or role_of(entry) == ""
  if is_over or (session ~= "" and redis.call("EXISTS", KEY.session(session)) == 0) then
    ended[#ended + 1] = credential
  end
end
return ended
