-- Give free devices to pending jobs: priority, then the share of the project, then age (see lib/pending_search.lua); one
-- host by best fit, else a gang over the fewest hosts. Jobs behind one that does not fit may overtake it, unless it has
-- waited past the bound, or devices are being freed for it: then nothing behind it in its pool is placed. Hosts that
-- cannot start work (see lib/health.lua) are avoided. What a project's quotas forbid (see lib/placement_quotas.lua) is
-- not searched for, and holds back jobs of its own project alone. No number of jobs that cannot be placed hides one that
-- can: the index finds it.
-- COST: at most MOST_PLACED placements in each pool, none begun after MOST_NODES_READ; the searches are bounded by the
-- fleet's devices and hosts (see lib/queue.lua) for each project that has pending jobs, everything else by the fleet,
-- by the hours of the window for each project with a quota of device-hours, and by MOST_TOLD dependents that are told.
-- The cost does not grow with the number of pending jobs, nor with that of their shapes. What was left is found by the
-- next call, in the same order. A call that leaves nothing to do says so, and until a job, a device or a host is added
-- or freed (or a second has passed) the next ones return at once.
-- USES: core jobs queue pending_search device_hours fair_share placement_quotas devices fleet counts sweeps ending starting
-- ARGV: limits: json
-- RETURNS: ids placed

local now = now_ms()
local POOLS = { "cuda", "cpu" }
local MOST_PLACED, MOST_NODES_READ = 32, 2000
local IDLE_MS, MOST_NAMED = 1000, 3

tell_dependents(limits.stream_cap, MOST_TOLD)
if redis.call("ZCARD", KEY.pending()) == 0 then
  redis.call("DEL", KEY.capacity())
  return {}
elseif redis.call("EXISTS", KEY.placement_idle()) == 1 then
  return {}
end

local fleet, fleet_has_cuda, away, slow = {}, false, { cuda = {}, cpu = {} }, { cuda = {}, cpu = {} }
local names = redis.call("ZRANGE", KEY.hosts(), "(" .. whole(now), "+inf", "BYSCORE")
table.sort(names)
for _, name in ipairs(names) do
  local known = redis.call("HMGET", KEY.host(name), "devices:cuda", "devices:cpu", "draining", "retry_at", "overcommitted")
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
  local takes_work, what = not is_drained and retry_at <= now, nil
  if takes_work then
    fleet[#fleet + 1] = host
    what = (known[5] or "null") ~= "null" and " is overcommitted"
  else
    what = is_drained and " is draining" or " does not start jobs"
  end
  for _, pool in ipairs(what and POOLS or {}) do
    if host.total[pool] > 0 then
      table.insert((takes_work and slow or away)[pool], "host " .. name .. what)
    end
  end
end

-- "free" devices, or the "total", which are free when the hosts are idle: hosts that have any, by pool, those with most
-- of them first.
local by_devices = { free = {}, total = {} }

local function has_more(count, pool, host, other)
  local left, right = host[count][pool], other[count][pool]
  return left > right or (left == right and host.name < other.name)
end

for count, pools in pairs(by_devices) do
  for _, pool in ipairs(POOLS) do
    -- The fleet is in order of names, and hosts have few different numbers of devices.
    local numbers, with_number, hosts = {}, {}, {}
    for _, host in ipairs(fleet) do
      local number = host[count][pool]
      if number > 0 and not with_number[number] then
        numbers[#numbers + 1] = number
        with_number[number] = {}
      end
      table.insert(with_number[number] or {}, host)
    end
    table.sort(numbers)
    for i = #numbers, 1, -1 do
      for _, host in ipairs(with_number[numbers[i]]) do
        hosts[#hosts + 1] = host
      end
    end
    pools[pool] = hosts
  end
end

-- Put a host, whose free devices became fewer, where it belongs.
local function sort_in(host, pool)
  local hosts = by_devices.free[pool]
  local at = 1
  while hosts[at] ~= host do
    if not hosts[at] then
      return
    end
    at = at + 1
  end
  while hosts[at + 1] and has_more("free", pool, hosts[at + 1], host) do
    hosts[at] = hosts[at + 1]
    at = at + 1
  end
  hosts[at] = host.free[pool] > 0 and host or nil
end

local function most_devices_first(count, pool, without)
  local hosts = by_devices[count][pool]
  if not without then
    return hosts
  end
  local others = {}
  for _, host in ipairs(hosts) do
    if host.name ~= without then
      others[#others + 1] = host
    end
  end
  return others
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

-- The groups of pending jobs. Those of the default project are always searched: an older version did not count them.
local groups = { auto = true, cuda = true, cpu = true }
for _, name in ipairs(redis.call("HKEYS", KEY.pending_groups())) do
  groups[name] = true
end
for name in pairs(groups) do
  local device, avoid, project = parse_group(name)
  groups[name] = { device = device, avoid = avoid, project = project }
  shares[project] = share_of(project, now)
  if not bounds[project] then
    read_bounds(project, now)
  end
end
overdue_since = now - limits.fair_share_bound_ms

-- What fits now ("free"), or ever ("total"): for each group its region (see lib/pending_search.lua). A job that avoids
-- a host goes elsewhere, unless no other hosts could ever hold it.
local function regions(count, pool)
  local everywhere, wanted = capacity_on(count, pool), {}
  local auto_pool = fleet_has_cuda and "cuda" or "cpu"
  local function want(name, group, capacity, above)
    wanted[#wanted + 1] = {
      group = name, project = group.project, capacity = capacity, above = above,
      holds = function(hosts)
        return math.min(capacity(hosts), room_of(group.project))
      end,
    }
  end
  for name, group in pairs(groups) do
    if (group.device == "auto" and auto_pool or group.device) == pool then
      if group.avoid then
        local ever = capacity_on("total", pool, group.avoid)
        want(name, group, capacity_on(count, pool, group.avoid), no_ranks)
        want(name, group, everywhere, ever)
      else
        want(name, group, everywhere, no_ranks)
      end
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
  -- The hosts are in order of their free devices, so those that suffice for the rest come first. Of those with the least,
  -- the first by name is taken: with equal hosts every call then chooses the same.
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
  for _, each in ipairs(POOLS) do
    sort_in(host, each)
  end
  return allocated
end

local function place(job, pool)
  local id, project = job.id, job.project
  local _, ranks, most_hosts = parse_shape(field(id, "shape"))
  local chosen, parts = choose_hosts(pool, ranks, most_hosts, field(id, "avoid")), {}
  for i, share in ipairs(chosen) do
    parts[i] = { host = share.host.name, devices = allocate(share.host, pool, share.count), pool = pool }
  end
  local attempt = begin_attempt(id, parts, now)
  for _, part in ipairs(parts) do
    redis.call("ZADD", KEY.outbox(), whole(now), part_name(id, attempt, part.host))
  end
  shares[project] = share_of(project, now)
  if bounds[project] then
    bounds[project].held = bounds[project].held + ranks
  end
end

local placed, all_placed = {}, true

-- The job that devices of the pool are being freed for, while it is pending.
local function beneficiary(pool)
  local id = redis.call("GET", KEY.made_room(pool))
  local score = id and redis.call("ZSCORE", KEY.pending(), id)
  local helped = score and { id = id, score = tonumber(score), project = project_of(id), gets_room = true }
  if not helped or is_barred(helped) then
    return nil
  end
  local _, ranks = parse_shape(field(id, "shape"))
  return ranks <= room_of(helped.project) and helped or nil
end

-- The first in order of the job that room is made for and of those that have waited past the bound.
local function find_barrier(pool, idle)
  local helped, overdue = beneficiary(pool), first_waiting_since(idle, now - limits.max_queue_bypass_ms)
  if helped and (not overdue or helped.id ~= overdue.id and is_before(helped, overdue)) then
    return helped
  end
  return overdue
end

-- What fits on idle hosts, of either pool.
local ever = { cuda = regions("total", "cuda"), cpu = regions("total", "cpu") }

local function bar(project)
  local both = {}
  for _, pool in ipairs(POOLS) do
    for _, region in ipairs(ever[pool]) do
      both[#both + 1] = region
    end
  end
  bar_project(project, both, now)
end

for project in pairs(bounds) do
  bar(project)
end

-- Place what fits in one pool. Returns the barrier, where there is one: a job that does not fit, and that nothing behind
-- it may overtake.
local function place_in_pool(pool)
  local idle = ever[pool]
  local barrier = find_barrier(pool, idle)
  local most = #placed + MOST_PLACED
  while true do
    local candidate = first_within(regions("free", pool), "-inf", "+inf")
    if not candidate or (barrier and is_before(barrier, candidate)) then
      return barrier
    end
    candidate.class, candidate.turn = turn(candidate)
    place(candidate, pool)
    placed[#placed + 1] = candidate
    if bounds[candidate.project] then
      bar(candidate.project)
    end
    -- A barrier whose own project may hold no more keeps nothing from others.
    if barrier and (barrier.id == candidate.id or bounds[candidate.project] and barrier.project == candidate.project) then
      barrier = find_barrier(pool, idle)
    end
    if #placed == most or nodes_read > MOST_NODES_READ then
      all_placed = false
      return nil
    end
  end
end

-- In words: hosts that are heard of and take no work, or work slowly.
local function name_some(words)
  table.sort(words)
  local some = table.concat(words, ", ", 1, math.min(#words, MOST_NAMED))
  return #words > MOST_NAMED and some .. " and " .. #words - MOST_NAMED .. " more like these" or some
end

-- The projects whose younger jobs go before a barrier that has not waited past the bound of fair share.
local function less_served(barrier)
  local class, projects = turn(barrier), nil
  if barrier.score - class * CLASS > overdue_since then
    for project, share in pairs(shares) do
      if share < shares[barrier.project] then
        projects = projects or {}
        projects[project] = true
      end
    end
  end
  return projects
end

-- Why a job waits is worked out when someone asks, from this.
local capacity = { auto = fleet_has_cuda and "cuda" or "cpu" }
for _, pool in ipairs(POOLS) do
  local barrier = place_in_pool(pool)
  capacity[pool] = {
    together = cumulative_devices("total", pool),
    away = #away[pool] > 0 and name_some(away[pool]) or nil,
    slow = #slow[pool] > 0 and name_some(slow[pool]) or nil,
    barrier = barrier and {
      id = barrier.id, score = barrier.score, yields_to = less_served(barrier), gets_room = barrier.gets_room,
    },
  }
end
capacity.projects = describe_bounds()
-- Most calls find what the one before found, and every write is also one to the append-only file.
local text = cjson.encode(capacity)
if redis.call("GET", KEY.capacity()) ~= text then
  redis.call("SET", KEY.capacity(), text)
end

if all_placed then
  redis.call("SET", KEY.placement_idle(), 1, "PX", IDLE_MS)
end

-- In the order in which their turns came, whichever their pools.
table.sort(placed, function(one, other)
  if one.class ~= other.class then
    return one.class < other.class
  elseif one.turn ~= other.turn then
    return one.turn < other.turn
  end
  return one.score < other.score or (one.score == other.score and one.id < other.id)
end)
for i, job in ipairs(placed) do
  placed[i] = job.id
end
return placed
