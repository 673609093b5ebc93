-- Every known host, by name, with its free devices and what it holds; a name limits the answer to that host.
-- USES: core
-- ARGV: name: str
-- RETURNS: {{"1" when alive, flat record, free cuda, free cpu, what is held by name}, …}

local now = now_ms()
local names = name ~= "" and { name } or redis.call("ZRANGE", KEY.hosts(), 0, -1)
table.sort(names)
local hosts = {}
for _, host in ipairs(names) do
  local expiry = redis.call("ZSCORE", KEY.hosts(), host)
  if expiry then
    hosts[#hosts + 1] = {
      tonumber(expiry) > now and "1" or "0",
      redis.call("HGETALL", KEY.host(host)),
      redis.call("SMEMBERS", KEY.host_free(host, "cuda")),
      redis.call("SMEMBERS", KEY.host_free(host, "cpu")),
      redis.call("HGETALL", KEY.host_parts(host)),
    }
  end
end
return hosts
