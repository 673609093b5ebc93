-- Forget an upload of a project, unless an unfinished job of it names the file; with a time of day, unless it was used
-- since.
-- COST: the unfinished jobs that name it.
-- USES: core jobs uploads
-- ARGV: project: str, file: str, before_ms: int
-- RETURNS: 1 when no project has the content any more, else 0

local MOST_NAMED = 5
if not has_upload(project, file) then
  return refuse("NOTFOUND", "there is no file " .. file)
end
local users = unfinished_users(project, file)
if #users > 0 then
  local some = table.concat(users, ", ", 1, math.min(#users, MOST_NAMED))
  local rest = #users > MOST_NAMED and " and " .. #users - MOST_NAMED .. " more" or ""
  return refuse("CONFLICT", file .. " is needed by " .. some .. rest)
end
local used = tonumber(redis.call("ZSCORE", KEY.uploads_used(), upload_name(project, file)) or 0)
if before_ms > 0 and used > before_ms then
  return 0
end
return drop_upload(project, file) and 1 or 0
