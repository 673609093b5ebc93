-- Let jobs that were accepted before there were projects belong to the default one, as far as they do not yet, and so
-- with uploads.
-- COST: `most` jobs looked at, and once all uploads.
-- USES: core jobs uploads
-- ARGV: cursor: str, most: int
-- RETURNS: the last id looked at when there may be more, else ""

for _, text in ipairs(redis.call("HVALS", KEY.files())) do
  local file = cjson.decode(text).id
  redis.call("HSETNX", KEY.uploads("default"), file, text)
  redis.call("SADD", KEY.upload_holders(file), "default")
  use_upload("default", file)
end
redis.call("DEL", KEY.files())

local from = cursor == "" and "-" or "(" .. cursor
local ids = redis.call("ZRANGE", KEY.jobs(), from, "+", "BYLEX", "LIMIT", 0, most)
for _, id in ipairs(ids) do
  local job = redis.call("HMGET", KEY.job(id), "project", "indexes", "state")
  if not job[1] and job[3] then
    local project = project_of(id)
    local indexes = cjson.decode(job[2] or "[]")
    local own = { "project:" .. project, "visible:" .. project }
    for file in string.gmatch(field(id, "spec") or "", '"(file_%x+)"') do
      own[#own + 1] = "file:" .. upload_name(project, file)
    end
    for _, index in ipairs(own) do
      indexes[#indexes + 1] = index
      redis.call("ZADD", KEY.jobs_by(index), 0, id)
    end
    redis.call("HSET", KEY.job(id), "project", project, "indexes", cjson.encode(indexes))
    enter_state(id, job[3])
  end
end
return #ids == most and ids[#ids] or ""
