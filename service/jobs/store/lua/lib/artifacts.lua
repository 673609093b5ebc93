-- How many bytes the artifacts of a project's jobs have. Needs core, jobs.

-- The artifacts of a job have so many more bytes, or fewer.
local function count_artifact_bytes(id, bytes)
  local project = project_of(id)
  redis.call("ZINCRBY", KEY.project_artifacts(project), whole(bytes), id)
  if redis.call("HINCRBY", KEY.artifact_bytes(), project, whole(bytes)) == 0 then
    redis.call("HDEL", KEY.artifact_bytes(), project)
  end
end

-- Why a job may not have this artifact of so many bytes, which had `before` until now, or nil. One that shrinks may.
local function too_much(id, name, bytes, before, limits)
  local held = tonumber(redis.call("ZSCORE", KEY.project_artifacts(project_of(id)), id) or 0)
  local is_new = redis.call("HEXISTS", KEY.job_artifacts(id), name) == 0
  if is_new and redis.call("HLEN", KEY.job_artifacts(id)) >= limits.max_job_artifacts then
    return "the job has " .. limits.max_job_artifacts .. " artifacts, the most that are allowed (TRIVET_MAX_JOB_ARTIFACTS)"
  elseif bytes > before and held - before + bytes > limits.max_job_artifact_bytes then
    return "it has " .. whole(bytes) .. " bytes and the job's other artifacts " .. whole(held - before)
      .. ", and together they may have " .. whole(limits.max_job_artifact_bytes) .. " (TRIVET_MAX_JOB_ARTIFACT_BYTES)"
  end
  return nil
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
