-- Begin an attempt of a pending job on the hosts of an allocation that was made for it, once all of them are heard of.
-- Each of the hosts asks; what one began is told to the others.
-- COST: the hosts, and the hours of the window where the project has a quota of device-hours.
-- USES: core jobs queue pending_search device_hours fair_share placement_quotas devices counts sweeps ending starting
-- ARGV: limits: json, job_id: str, allocation: json, *hosts: str
-- RETURNS: {"placed", attempt} | {"waits", ""} for hosts | {"over", ""} where the job has no use for the allocation

local now = now_ms()
local state = field(job_id, "state")

local function is_here(placement)
  for i, share in ipairs(placement) do
    if share.host ~= hosts[i] then
      return false
    end
  end
  return #placement == #hosts
end

if state == "starting" or state == "running" then
  local placement = field(job_id, "placement")
  return is_here(cjson.decode(placement)) and { "placed", field(job_id, "attempt") } or { "over", "" }
elseif state ~= "queued" or not redis.call("ZSCORE", KEY.launching(allocation.launcher), job_id) then
  return { "over", "" }
end

local parts, ranks = {}, 0
for i, name in ipairs(hosts) do
  local told = redis.call("HGET", KEY.host(name), "allocation")
  if not told or told == "null" or tonumber(redis.call("ZSCORE", KEY.hosts(), name) or 0) <= now then
    return { "waits", "" }
  end
  local has, devices = cjson.decode(told), {}
  for device = 0, has.devices - 1 do
    devices[#devices + 1] = device
  end
  ranks = ranks + has.devices
  parts[i] = { host = name, devices = devices, pool = has.pool }
end

local _, wanted = parse_shape(field(job_id, "shape"))
read_bounds(project_of(job_id), now)
if ranks ~= wanted or ranks > room_of(project_of(job_id)) then
  return { "over", "" }
end
redis.call("HSET", KEY.job(job_id), "allocation", cjson.encode(allocation))
return { "placed", whole(begin_attempt(job_id, parts, now)) }
