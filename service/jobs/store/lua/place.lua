-- Give free devices to pending jobs: priority, then age; one host by best fit, else a gang over the fewest hosts.
-- Jobs behind one that does not fit may overtake it, unless it has waited past the bound: then nothing behind it
-- in its pool is placed. No number of jobs that cannot be placed hides one that can: the index finds it.
-- COST: at most MOST_PLACED placements in each pool, none begun after MOST_NODES_READ; the searches are bounded by the
-- fleet's devices and hosts (see lib/queue.lua), everything else by the fleet. Jobs and shapes that are pending do not
-- count. What was left is found by the next call, in the same order. A call that leaves nothing to do says so, and
-- until a job, a device or a host is added or freed (or a second has passed) the next ones return at once.
-- USES: core jobs queue search devices
-- ARGV: limits: json
-- RETURNS: ids placed

local now = now_ms()
local POOLS = { "cuda", "cpu" }
local MOST_PLACED, MOST_NODES_READ = 32, 2000
local SETTLED_MS = 1000

if redis.call("ZCARD", KEY.pending()) == 0 then
  redis.call("DEL", KEY.capacity())
  return {}
elseif redis.call("EXISTS", KEY.settled()) == 1 then
  return {}
end

local fleet, fleet_has_cuda = {}, false
for _, name in ipairs(redis.call("ZRANGE", KEY.hosts(), "(" .. whole(now), "+inf", "BYSCORE")) do
  local known = redis.call("HMGET", KEY.host(name), "devices:cuda", "devices:cpu", "draining")
  local host = { name = name, free = {}, total = { cuda = tonumber(known[1] or 0), cpu = tonumber(known[2] or 0) } }
  for _, pool in ipairs(POOLS) do
    host.free[pool] = host.total[pool] > 0 and redis.call("SCARD", KEY.host_free(name, pool)) or 0
  end
  fleet_has_cuda = fleet_has_cuda or host.total.cuda > 0
  if not known[3] then
    fleet[#fleet + 1] = host
  end
end

-- The hosts that have any of it, the roomiest first, and how much the first 1, 2, … of them have together. `have` is
-- "free", or "total": what they have when idle.
local function rooms(have, pool)
  local hosts, together = {}, {}
  for _, host in ipairs(fleet) do
    if host[have][pool] > 0 then
      hosts[#hosts + 1] = host
    end
  end
  table.sort(hosts, function(a, b)
    return a[have][pool] > b[have][pool] or (a[have][pool] == b[have][pool] and a.name < b.name)
  end)
  for i, host in ipairs(hosts) do
    together[i] = (together[i - 1] or 0) + host[have][pool]
  end
  return hosts, together
end

local function regions(pool, together)
  local function holds(hosts)
    return together[math.min(hosts, #together)] or 0
  end
  local wanted = { { group = pool, holds = holds } }
  if (pool == "cuda") == fleet_has_cuda then
    wanted[2] = { group = "auto", holds = holds }
  end
  return wanted
end

-- The fewest hosts: all but the last give all their free devices, the last is the one with the least that suffices.
local function share_out(pool, ranks)
  local hosts, together = rooms("free", pool)
  local count = 1
  while together[count] < ranks do
    count = count + 1
  end
  local shares, rest = {}, ranks - (together[count - 1] or 0)
  for i = 1, count - 1 do
    shares[i] = { host = hosts[i], count = hosts[i].free[pool] }
  end
  local last = count
  while last < #hosts and hosts[last + 1].free[pool] >= rest do
    last = last + 1
  end
  while last > count and hosts[last - 1].free[pool] == hosts[last].free[pool] do
    last = last - 1
  end
  shares[count] = { host = hosts[last], count = rest }
  return shares
end

local function take(host, pool, count)
  local devices = redis.call("SMEMBERS", KEY.host_free(host.name, pool))
  for i, device in ipairs(devices) do
    devices[i] = tonumber(device)
  end
  table.sort(devices)
  local taken = { unpack(devices, 1, count) }
  redis.call("SREM", KEY.host_free(host.name, pool), unpack(taken))
  host.free[pool] = host.free[pool] - count
  return taken
end

local function place(id, pool)
  dequeue(id)
  local _, ranks = parse_shape(field(id, "shape"))
  local attempt = redis.call("HINCRBY", KEY.job(id), "attempt", 1)
  local placement = {}
  redis.call("DEL", KEY.job_parts(id), KEY.job_batches(id))
  for i, share in ipairs(share_out(pool, ranks)) do
    local name = share.host.name
    local devices = take(share.host, pool, share.count)
    placement[i] = { host = name, devices = devices, pool = pool }
    hold(name, id, attempt, { pool = pool, devices = devices })
    redis.call("HSET", KEY.job_parts(id), name, "starting")
    redis.call("ZADD", KEY.leases(), whole(now + limits.starting_lease_ms), part_name(id, attempt, name))
    redis.call("ZADD", KEY.outbox(), whole(now), part_name(id, attempt, name))
  end
  redis.call("HSET", KEY.job(id), "placement", cjson.encode(placement))
  set_state(id, limits.stream_cap, "starting", now)
end

local placed, all_done = {}, true

-- Place what fits in one pool; the job that may not be overtaken, where one stands in the way.
local function fill(pool, ever)
  local latest = now - limits.max_queue_bypass_ms
  local barrier = first_waiting_since(ever, latest)
  local most = #placed + MOST_PLACED
  while true do
    local _, together = rooms("free", pool)
    local turn = first_within(regions(pool, together), "-inf", "+inf")
    if not turn or (barrier and is_before(barrier, turn)) then
      return barrier
    end
    place(turn.id, pool)
    placed[#placed + 1] = turn
    if barrier and barrier.id == turn.id then
      barrier = first_waiting_since(ever, latest)
    end
    if #placed == most or nodes_read > MOST_NODES_READ then
      all_done = false
      return nil
    end
  end
end

-- Why a job waits is worked out when someone asks, from this.
local capacity = { auto = fleet_has_cuda and "cuda" or "cpu" }
for _, pool in ipairs(POOLS) do
  local _, together = rooms("total", pool)
  local barrier = fill(pool, regions(pool, together))
  capacity[pool] = { together = together, barrier = barrier and { id = barrier.id, score = barrier.score } }
end
local text = cjson.encode(capacity)
if redis.call("GET", KEY.capacity()) ~= text then
  redis.call("SET", KEY.capacity(), text)
end

if all_done then
  redis.call("SET", KEY.settled(), 1, "PX", SETTLED_MS)
end

table.sort(placed, is_before)
for i, job in ipairs(placed) do
  placed[i] = job.id
end
return placed
