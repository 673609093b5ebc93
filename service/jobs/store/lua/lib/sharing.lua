-- Which other projects may read a job. Needs core, jobs.

local function shared_with(id)
  return cjson.decode(field(id, "shared") or "[]")
end

-- Keep a list of names without one of them, and with it again at the end where it is to be there.
local function keep(id, name, names, one, wanted)
  local kept = {}
  for _, each in ipairs(names) do
    if each ~= one then
      kept[#kept + 1] = each
    end
  end
  if wanted then
    kept[#kept + 1] = one
  end
  redis.call("HSET", KEY.job(id), name, #kept > 0 and cjson.encode(kept) or "[]")
end

local function start_sharing(id, project)
  local index = "visible:" .. project
  keep(id, "shared", shared_with(id), project, true)
  keep(id, "indexes", cjson.decode(field(id, "indexes")), index, true)
  redis.call("ZADD", KEY.jobs_by(index), 0, id)
end

local function stop_sharing(id, project)
  local index = "visible:" .. project
  keep(id, "shared", shared_with(id), project, false)
  keep(id, "indexes", cjson.decode(field(id, "indexes")), index, false)
  redis.call("ZREM", KEY.jobs_by(index), id)
end
