-- A piece of the queue, in order of age: queued jobs after the given id, with what decides when they are placed.
-- COST: `most` jobs.
-- USES: core
-- ARGV: after: str, most: int
-- RETURNS: {the store's time in ms, {id, "1" when it waits for devices and "" when for jobs, field, …}, …}

local FIELDS = { "shape", "priority", "queued_at", "kind", "owner", "timeout_s", "project" }
local piece, from = { now_ms() }, after == "" and "-" or "(" .. after
for _, id in ipairs(redis.call("ZRANGE", KEY.jobs_by("state:queued"), from, "+", "BYLEX", "LIMIT", 0, most)) do
  local row = { id, redis.call("ZSCORE", KEY.pending(), id) and "1" or "" }
  for _, value in ipairs(redis.call("HMGET", KEY.job(id), unpack(FIELDS))) do
    row[#row + 1] = value or ""
  end
  piece[#piece + 1] = row
end
return piece
