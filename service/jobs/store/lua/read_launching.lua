-- What a launcher is to get devices for: the first pending jobs in order, and what has become of some jobs. Those that
-- quotas keep back are left out, and say so.
-- COST: `most` jobs, those named, and the hours of the window for each project with a quota of device-hours among them.
-- USES: core jobs queue pending_search device_hours fair_share placement_quotas
-- ARGV: limits: json, launcher: str, most: int, *ids: str
-- RETURNS: {{id, ranks, hosts, device, priority, timeout_s, kind}, …}, {{id, its state or "", id of its allocation or ""}, …}

local now, seen = now_ms(), {}

local function is_over_quota(id, ranks)
  local project = project_of(id)
  if not seen[project] then
    read_bounds(project, now)
    seen[project] = true
  end
  return ranks > room_of(project)
end

local pending, known = {}, {}
for _, id in ipairs(redis.call("ZRANGE", KEY.launching(launcher), 0, most - 1)) do
  local job = redis.call("HMGET", KEY.job(id), "shape", "device", "priority", "timeout_s", "kind")
  local _, ranks, hosts = parse_shape(job[1])
  if is_over_quota(id, ranks) then
    local why = quota_reason(id, project_of(id), ranks, { projects = describe_bounds() })
    redis.call("HSET", KEY.job(id), "allocating", why)
  else
    pending[#pending + 1] = { id, whole(ranks), whole(hosts), job[2], job[3], job[4] or "", job[5] }
  end
end
for i, id in ipairs(ids) do
  local allocation = field(id, "allocation")
  known[i] = { id, field(id, "state") or "", allocation and cjson.decode(allocation).id or "" }
end
return { pending, known }
