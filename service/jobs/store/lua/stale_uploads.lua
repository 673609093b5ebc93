-- Uploads that were last used before a time of day; one that an unfinished job names is in use, now.
-- COST: `most` uploads.
-- USES: core jobs uploads
-- ARGV: before_ms: int, most: int
-- RETURNS: names, each a project, a slash and a file

local stale = {}
for _, name in ipairs(redis.call("ZRANGE", KEY.uploads_used(), 0, whole(before_ms), "BYSCORE", "LIMIT", 0, most)) do
  local project, file = string.match(name, "^(.+)/(.+)$")
  if #unfinished_users(project, file) > 0 then
    use_upload(project, file)
  else
    stale[#stale + 1] = name
  end
end
return stale
