-- What a project may have. Needs core, jobs.

-- The limit of this name, or nil where the project has none.
local function quota_of(project, name)
  local text = redis.call("HGET", KEY.projects(), project)
  local quotas = text and cjson.decode(text).quotas
  return type(quotas) == "table" and tonumber(quotas[name]) or nil
end

-- Whether a project's jobs may be scripts of their authors'.
local function allows_scripts(project)
  local text = redis.call("HGET", KEY.projects(), project)
  return text and cjson.decode(text).scripts == true
end

-- Bytes of what a project's jobs have produced: artifacts, and events in streams.
local function produced_bytes(project)
  local artifacts = redis.call("HGET", KEY.artifact_bytes(), project) or 0
  return tonumber(artifacts) + tonumber(redis.call("HGET", KEY.event_bytes(), project) or 0)
end

local accepted_together = {}

-- The name of the quota that one more job would be over and how much it allows, or nil. Jobs that one call accepts count
-- together. The parent of a sweep or chain, which has no shape, neither waits nor runs: its jobs are judged instead.
local function over_quota(project, record)
  if not record.shape then
    return nil
  end
  local queued, highest = quota_of(project, "queued_jobs"), quota_of(project, "highest_priority")
  local longest, timeout = quota_of(project, "longest_time_s"), tonumber(record.timeout_s)
  local others = accepted_together[project] or 0
  accepted_together[project] = others + 1
  local devices = quota_of(project, "devices")
  local ranks = tonumber(string.match(record.shape, ":(%d+):"))
  if devices and ranks > devices then
    return "devices", devices
  elseif highest and tonumber(record.priority) > highest then
    return "highest_priority", highest
  elseif longest and (not timeout or timeout > longest) then
    return "longest_time_s", longest
  elseif queued and redis.call("ZCARD", KEY.jobs_by("state:queued:" .. project)) + others >= queued then
    return "queued_jobs", queued
  end
  local artifacts = quota_of(project, "artifact_bytes")
  if artifacts and produced_bytes(project) >= artifacts then
    return "artifact_bytes", artifacts
  end
  return nil
end

-- Bytes of all uploads of a project.
local function uploaded_bytes(project)
  local bytes = 0
  for _, text in ipairs(redis.call("HVALS", KEY.uploads(project))) do
    bytes = bytes + cjson.decode(text).bytes
  end
  return bytes
end
