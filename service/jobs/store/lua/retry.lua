-- Queue a failed or cancelled job again, with all its retries; it keeps its attempts, artifacts and checkpoints. Of a
-- sweep, queue all jobs that failed or were cancelled, except those that would fail alike.
-- COST: the jobs that it needs, 64 at most; of a sweep those of all its jobs.
-- USES: core jobs queue counts uploads quotas submission sweeps retrying
-- ARGV: limits: json, job_id: str
-- RETURNS: flat fields and values

if not field(job_id, "state") then
  return no_such_job(job_id)
end
local again, refusal = { job_id }, why_not_again(job_id)
if is_sweep(job_id) then
  again = {}
  local final
  for _, child in ipairs(jobs_of(job_id)) do
    local why = why_final(child)
    final = final or why
    if not why and field(child, "state") ~= "succeeded" then
      again[#again + 1] = child
    end
  end
  refusal = refusal or (#again == 0 and final)
  for _, child in ipairs(again) do
    refusal = refusal or why_not_again(child, again)
  end
end
if refusal then
  return refuse("CONFLICT", refusal)
end
for _, id in ipairs(again) do
  local over = quota_against(id)
  if over then
    return refuse("QUOTA", over)
  end
end
for _, id in ipairs(again) do
  queue_again(id, limits.stream_cap)
end
return view(job_id)
