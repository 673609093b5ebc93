-- Give free devices to pending jobs: priority, then age; one host by best fit, else a gang over the fewest hosts.
-- Jobs behind one that does not fit may overtake it, unless it has waited past the bound: then nothing behind it in its
-- pool is placed. Hosts that cannot start work (see lib/health.lua) are avoided. No number of jobs that cannot be placed
-- hides one that can: the index finds it.
-- COST: at most MOST_PLACED placements in each pool, none begun after MOST_NODES_READ; the searches are bounded by the
-- fleet's devices and hosts (see lib/queue.lua), everything else by the fleet, and by MOST_TOLD dependents that are
-- told. The cost does not grow with the number of pending jobs, nor with that of their shapes. What was left is found by
-- the next call, in the same order. A call that leaves nothing to do says so, and until a job, a device or a host is
-- added or freed (or a second has passed) the next ones return at once.
-- USES: core jobs queue pending_search devices fleet ending
-- ARGV: limits: json
-- RETURNS: ids placed

local now = now_ms()
local POOLS = { "cuda", "cpu" }
local MOST_PLACED, MOST_NODES_READ = 32, 2000
local IDLE_MS = 1000

tell_dependents(limits.stream_cap, MOST_TOLD)
if redis.call("ZCARD", KEY.pending()) == 0 then
  redis.call("DEL", KEY.capacity())
  return {}
elseif redis.call("EXISTS", KEY.placement_idle()) == 1 then
  return {}
end

local fleet, fleet_has_cuda = {}, false
for _, name in ipairs(redis.call("ZRANGE", KEY.hosts(), "(" .. whole(now), "+inf", "BYSCORE")) do
  local known = redis.call("HMGET", KEY.host(name), "devices:cuda", "devices:cpu", "draining", "retry_at")
  local host = { name = name, free = {}, total = { cuda = tonumber(known[1] or 0), cpu = tonumber(known[2] or 0) } }
  for _, pool in ipairs(POOLS) do
    host.free[pool] = host.total[pool] > 0 and redis.call("SCARD", KEY.host_free(name, pool)) or 0
  end
  local is_drained = known[3]
  fleet_has_cuda = fleet_has_cuda or draws_auto_to_cuda(host.total.cuda, is_drained)
  -- A failing host is left alone for a while, then tried with one part.
  local retry_at = tonumber(known[4] or 0)
  host.on_trial = retry_at > 0
  if host.on_trial and redis.call("HLEN", KEY.host_parts(name)) > 0 then
    host.free = { cuda = 0, cpu = 0 }
  end
  if not is_drained and retry_at <= now then
    fleet[#fleet + 1] = host
  end
end

-- The hosts that have any devices of the pool, those with most of them first. `count` says which devices: "free", or
-- "total", which are free when the hosts are idle.
local function most_devices_first(count, pool, without)
  local hosts = {}
  for _, host in ipairs(fleet) do
    if host[count][pool] > 0 and host.name ~= without then
      hosts[#hosts + 1] = host
    end
  end
  table.sort(hosts, function(a, b)
    return a[count][pool] > b[count][pool] or (a[count][pool] == b[count][pool] and a.name < b.name)
  end)
  return hosts
end

-- How many devices the 1, 2, … hosts with most of them have together.
local function cumulative_devices(count, pool, without)
  local cumulative = {}
  for i, host in ipairs(most_devices_first(count, pool, without)) do
    cumulative[i] = (cumulative[i - 1] or 0) + host[count][pool]
  end
  return cumulative
end

-- A function: how many ranks at most so many hosts hold.
local function capacity_on(count, pool, without)
  local cumulative = cumulative_devices(count, pool, without)
  return function(hosts)
    return cumulative[math.min(hosts, #cumulative)] or 0
  end
end

local function no_ranks()
  return 0
end

-- What fits now ("free"), or ever ("total"): for each group its region (see lib/pending_search.lua). A job that avoids a host
-- goes elsewhere, unless no other hosts could ever hold it.
local avoided = redis.call("HKEYS", KEY.avoided())
table.sort(avoided)

local function regions(count, pool)
  local devices = { pool, (pool == "cuda") == fleet_has_cuda and "auto" or nil }
  local everywhere, wanted = capacity_on(count, pool), {}
  for _, device in ipairs(devices) do
    wanted[#wanted + 1] = { group = device, holds = everywhere, above = no_ranks }
  end
  for _, host in ipairs(avoided) do
    local elsewhere, ever = capacity_on(count, pool, host), capacity_on("total", pool, host)
    for _, device in ipairs(devices) do
      wanted[#wanted + 1] = { group = avoiding(device, host), holds = elsewhere, above = no_ranks }
      wanted[#wanted + 1] = { group = avoiding(device, host), holds = everywhere, above = ever }
    end
  end
  return wanted
end

-- The fewest hosts: all but the last give all their free devices, the last is the one with the least that suffices.
local function choose_hosts(pool, ranks, most_hosts, avoid)
  if avoid and capacity_on("free", pool, avoid)(most_hosts) < ranks then
    avoid = nil
  end
  local hosts, cumulative = most_devices_first("free", pool, avoid), cumulative_devices("free", pool, avoid)
  local fewest = 1
  while cumulative[fewest] < ranks do
    fewest = fewest + 1
  end
  local shares, rest = {}, ranks - (cumulative[fewest - 1] or 0)
  for i = 1, fewest - 1 do
    shares[i] = { host = hosts[i], count = hosts[i].free[pool] }
  end
  local last = fewest
  while last < #hosts and hosts[last + 1].free[pool] >= rest do
    last = last + 1
  end
  while last > fewest and hosts[last - 1].free[pool] == hosts[last].free[pool] do
    last = last - 1
  end
  shares[fewest] = { host = hosts[last], count = rest }
  return shares
end

-- Take so many of the host's free devices, those with the lowest indices.
local function allocate(host, pool, count)
  local devices = redis.call("SMEMBERS", KEY.host_free(host.name, pool))
  for i, device in ipairs(devices) do
    devices[i] = tonumber(device)
  end
  table.sort(devices)
  local allocated = { unpack(devices, 1, count) }
  redis.call("SREM", KEY.host_free(host.name, pool), unpack(allocated))
  host.free[pool] = host.free[pool] - count
  if host.on_trial then
    host.free = { cuda = 0, cpu = 0 }
  end
  return allocated
end

-- No number is given twice, also where a lost attempt was taken up again and the one in its stead withdrawn.
local function next_attempt(id)
  local job = redis.call("HMGET", KEY.job(id), "attempt", "last_attempt")
  local attempt = math.max(tonumber(job[1]), tonumber(job[2] or 0)) + 1
  redis.call("HSET", KEY.job(id), "attempt", attempt, "last_attempt", attempt)
  return attempt
end

local function place(id, pool)
  dequeue(id)
  local _, ranks, most_hosts = parse_shape(field(id, "shape"))
  local attempt, placement = next_attempt(id), {}
  redis.call("DEL", KEY.job_parts(id), KEY.job_batches(id))
  for i, share in ipairs(choose_hosts(pool, ranks, most_hosts, field(id, "avoid"))) do
    local name = share.host.name
    local devices = allocate(share.host, pool, share.count)
    placement[i] = { host = name, devices = devices, pool = pool }
    hold(name, id, attempt, { pool = pool, devices = devices, placed_at = now })
    redis.call("HSET", KEY.job_parts(id), name, "starting")
    redis.call("ZADD", KEY.leases(), whole(now + limits.starting_lease_ms), part_name(id, attempt, name))
    redis.call("ZADD", KEY.outbox(), whole(now), part_name(id, attempt, name))
  end
  redis.call("HSET", KEY.job(id), "placement", cjson.encode(placement))
  set_state(id, limits.stream_cap, "starting")
end

local placed, all_placed = {}, true

-- Place what fits in one pool. Returns the barrier, where there is one: the job that has waited past the bound and does
-- not fit, so that nothing behind it is placed. `idle` are the regions of what fits on idle hosts.
local function place_in_pool(pool, idle)
  local latest = now - limits.max_queue_bypass_ms
  local barrier = first_waiting_since(idle, latest)
  local most = #placed + MOST_PLACED
  while true do
    local candidate = first_within(regions("free", pool), "-inf", "+inf")
    if not candidate or (barrier and is_before(barrier, candidate)) then
      return barrier
    end
    place(candidate.id, pool)
    placed[#placed + 1] = candidate
    if barrier and barrier.id == candidate.id then
      barrier = first_waiting_since(idle, latest)
    end
    if #placed == most or nodes_read > MOST_NODES_READ then
      all_placed = false
      return nil
    end
  end
end

-- Why a job waits is worked out when someone asks, from this.
local capacity = { auto = fleet_has_cuda and "cuda" or "cpu" }
for _, pool in ipairs(POOLS) do
  local barrier = place_in_pool(pool, regions("total", pool))
  capacity[pool] = {
    together = cumulative_devices("total", pool),
    barrier = barrier and { id = barrier.id, score = barrier.score },
  }
end
local text = cjson.encode(capacity)
if redis.call("GET", KEY.capacity()) ~= text then
  redis.call("SET", KEY.capacity(), text)
end

if all_placed then
  redis.call("SET", KEY.placement_idle(), 1, "PX", IDLE_MS)
end

table.sort(placed, is_before)
for i, job in ipairs(placed) do
  placed[i] = job.id
end
return placed
