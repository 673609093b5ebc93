-- Append events of a claimed part to the job's stream; each is a pair of type and JSON.
-- A batch that is there already (its writer got no answer and sent it again) is not appended twice; 0 is no number.
-- COST: the events given, and those that have to go for them; a first batch also clears what was held against its host.
-- USES: core jobs events queue device_hours fair_share devices counts sweeps ending fencing health
-- ARGV: limits: json, job_id: str, attempt: int, host: str, batch: int, progress: str, phases: str,
-- ARGV: reached: str, *entries: str
-- RETURNS: 1, or 0 of a batch that was known

if not may_write(job_id, attempt, host, limits) then
  return superseded(job_id, attempt, host)
end
if batch > 0 then
  if batch <= tonumber(redis.call("HGET", KEY.job_batches(job_id), host) or 0) then
    return 0
  end
  redis.call("HSET", KEY.job_batches(job_id), host, batch)
end
start_succeeded(job_id, attempt, host)
local bytes = 0
for i = 1, #entries, 2 do
  redis.call("XADD", KEY.job_events(job_id), "*", "t", entries[i], "d", entries[i + 1])
  bytes = bytes + #entries[i + 1]
end
count_event_bytes(job_id, bytes)
trim_events(job_id, limits)
note_followed(job_id, entries)
add_count(#entries / 2, "trivet_events_total")
if progress ~= "" then
  redis.call("HSET", KEY.job(job_id), "progress", progress)
end
if phases ~= "" then
  add_phases(job_id, cjson.decode(phases))
end
if reached ~= "" then
  note_reached(job_id, cjson.decode(reached))
end
return 1
