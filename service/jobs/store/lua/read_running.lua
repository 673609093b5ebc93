-- A piece of the jobs in one state that holds devices, after the given id, with what tells when they end.
-- COST: `most` jobs.
-- USES: core
-- ARGV: state: str, after: str, most: int
-- RETURNS: {{id, kind, time limit in s or "", progress or "", placement, ms since its attempt was placed, project or ""}, …}

local now, piece, from = now_ms(), {}, after == "" and "-" or "(" .. after
for _, id in ipairs(redis.call("ZRANGE", KEY.jobs_by("state:" .. state), from, "+", "BYLEX", "LIMIT", 0, most)) do
  local job = redis.call("HMGET", KEY.job(id), "kind", "timeout_s", "progress", "placement", "attempt", "project")
  local elapsed = 0
  for _, share in ipairs(cjson.decode(job[4] or "[]")) do
    local part = redis.call("HGET", KEY.host_parts(share.host), id .. ":" .. job[5])
    elapsed = math.max(elapsed, part and now - (cjson.decode(part).placed_at or now) or 0)
  end
  piece[#piece + 1] = { id, job[1], job[2] or "", job[3] or "", job[4] or "[]", whole(elapsed), job[6] or "" }
end
return piece
