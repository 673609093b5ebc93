-- What projects have uploaded. The content of a file is kept once, whoever uploaded it; each project that did has an
-- entry of its own, and knows of no other. Needs core, jobs.

local UNFINISHED = { "queued", "starting", "running", "cancelling" }

local function upload_name(project, file)
  return project .. "/" .. file
end

local function has_upload(project, file)
  return redis.call("HEXISTS", KEY.uploads(project), file) == 1
end

local function use_upload(project, file)
  redis.call("ZADD", KEY.uploads_used(), whole(wall_ms()), upload_name(project, file))
end

-- The unfinished jobs of the project whose specs name the file.
local function unfinished_users(project, file)
  local users, named = {}, KEY.jobs_by("file:" .. upload_name(project, file))
  if redis.call("EXISTS", named) == 1 then
    for _, state in ipairs(UNFINISHED) do
      local index = KEY.jobs_by("state:" .. state .. ":" .. project)
      for _, id in ipairs(redis.call("ZINTER", 2, named, index)) do
        users[#users + 1] = id
      end
    end
  end
  return users
end

-- Drop a project's entry. Returns whether no other project has one, so that the content may go.
local function drop_upload(project, file)
  redis.call("HDEL", KEY.uploads(project), file)
  redis.call("ZREM", KEY.uploads_used(), upload_name(project, file))
  redis.call("SREM", KEY.upload_holders(file), project)
  return redis.call("EXISTS", KEY.upload_holders(file)) == 0
end
