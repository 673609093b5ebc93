-- What is known of uploads of a project: when they were last used, and the newest jobs that name them.
-- COST: the uploads asked for, and MOST_NAMED jobs of each.
-- USES: core jobs uploads
-- ARGV: project: str, *files: str
-- RETURNS: for each {last use in ms or "", how many jobs name it, {the newest of them}, "1" while one is unfinished}

local MOST_NAMED = 10
local found = {}
for i, file in ipairs(files) do
  local named = KEY.jobs_by("file:" .. upload_name(project, file))
  found[i] = {
    redis.call("ZSCORE", KEY.uploads_used(), upload_name(project, file)) or "",
    redis.call("ZCARD", named),
    redis.call("ZREVRANGE", named, 0, MOST_NAMED - 1),
    #unfinished_users(project, file) > 0 and "1" or "",
  }
end
return found
