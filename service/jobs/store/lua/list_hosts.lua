-- Every known host, by name, with its free devices and what it holds; a name limits the answer to that host.
-- COST: the hosts and their devices.
-- USES: core fleet
-- ARGV: limits: json, name: str
-- RETURNS: {{"1" when alive, flat record, free cuda, free cpu, what is held by name}, …}

-- The store's clock stands still while nobody calls, as when the last worker died: then the time of day tells.
local SILENT_BEATS = 3
local now, wall = now_ms(), wall_ms()
local names = name ~= "" and { name } or redis.call("ZRANGE", KEY.hosts(), 0, -1)
table.sort(names)
local hosts = {}
for _, host in ipairs(names) do
  local expiry = redis.call("ZSCORE", KEY.hosts(), host)
  if expiry then
    local known = redis.call("HMGET", KEY.host(host), "seen_at", "retry_at", "devices:cuda", "draining")
    local heard_of = tonumber(expiry) > now and wall - tonumber(known[1]) < SILENT_BEATS * limits.heartbeat_ms
    local record = redis.call("HGETALL", KEY.host(host))
    if known[2] then
      record[#record + 1] = "retry_in_ms"
      record[#record + 1] = whole(math.max(0, tonumber(known[2]) - now))
    end
    if heard_of and draws_auto_to_cuda(tonumber(known[3] or 0), known[4]) then
      record[#record + 1] = "draws_auto_to_cuda"
      record[#record + 1] = "1"
    end
    hosts[#hosts + 1] = {
      heard_of and "1" or "0",
      record,
      redis.call("SMEMBERS", KEY.host_free(host, "cuda")),
      redis.call("SMEMBERS", KEY.host_free(host, "cpu")),
      redis.call("HGETALL", KEY.host_parts(host)),
    }
  end
end
return hosts
