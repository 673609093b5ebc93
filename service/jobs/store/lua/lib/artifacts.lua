-- How many bytes the artifacts of a project's jobs have. Needs core, jobs.

-- The artifacts of a job have so many more bytes, or fewer.
local function count_artifact_bytes(id, bytes)
  local project = project_of(id)
  redis.call("ZINCRBY", KEY.project_artifacts(project), whole(bytes), id)
  if redis.call("HINCRBY", KEY.artifact_bytes(), project, whole(bytes)) == 0 then
    redis.call("HDEL", KEY.artifact_bytes(), project)
  end
end

-- Artifacts that an older version recorded were not counted.
local function forget_artifacts(id)
  local bytes = redis.call("ZSCORE", KEY.project_artifacts(project_of(id)), id)
  if bytes then
    count_artifact_bytes(id, -tonumber(bytes))
    redis.call("ZREM", KEY.project_artifacts(project_of(id)), id)
  end
  redis.call("UNLINK", KEY.job_artifacts(id))
end
