-- Give free devices to pending jobs: priority, then age; one host by best fit, else a gang over the fewest hosts.
-- Jobs behind one that does not fit may overtake it, unless it has waited past the bound: then nothing behind it
-- in its pool is placed. Only the head of each shape is looked at, so no number of jobs that cannot be placed
-- hides one that can.
-- USES: core jobs queue devices
-- ARGV: limits: json
-- RETURNS: ids placed

local now = now_ms()
local POOLS = { "cuda", "cpu" }

local fleet, fleet_has_cuda = {}, false
for _, name in ipairs(redis.call("ZRANGE", KEY.hosts(), "(" .. whole(now), "+inf", "BYSCORE")) do
  local host = { name = name, free = {}, total = {} }
  for _, pool in ipairs(POOLS) do
    host.total[pool] = declared(name, pool)
    host.free[pool] = redis.call("SCARD", KEY.host_free(name, pool))
  end
  fleet_has_cuda = fleet_has_cuda or host.total.cuda > 0
  if not redis.call("HGET", KEY.host(name), "draining") then
    fleet[#fleet + 1] = host
  end
end
table.sort(fleet, function(a, b) return a.name < b.name end)

-- Hosts and how much each gives, or nil. `have` is "free", or "total" to ask whether it could ever fit.
local function fit(have, pool, ranks, most_hosts)
  local function smallest_that_holds(needed, taken)
    local best
    for _, host in ipairs(fleet) do
      local room = host[have][pool]
      if not taken[host.name] and room >= needed and (not best or room < best[have][pool]) then
        best = host
      end
    end
    return best
  end
  local one = smallest_that_holds(ranks, {})
  if one then
    return { { host = one, count = ranks } }
  end
  local by_room = { unpack(fleet) }
  table.sort(by_room, function(a, b)
    return a[have][pool] > b[have][pool] or (a[have][pool] == b[have][pool] and a.name < b.name)
  end)
  local gang, taken, needed = {}, {}, ranks
  for i = 1, math.min(most_hosts - 1, #by_room) do
    local room = by_room[i][have][pool]
    if room == 0 then
      return nil
    end
    gang[i] = { host = by_room[i], count = room }
    taken[by_room[i].name] = true
    needed = needed - room
    local last = smallest_that_holds(needed, taken)
    if last then
      gang[i + 1] = { host = last, count = needed }
      return gang
    end
  end
  return nil
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

local function place(id, pool, shares)
  dequeue(id)
  local attempt = redis.call("HINCRBY", KEY.job(id), "attempt", 1)
  local placement = {}
  redis.call("DEL", KEY.job_parts(id), KEY.job_batches(id))
  for i, share in ipairs(shares) do
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

local function is_before(score, id, other)
  return score < other.score or (score == other.score and id < other.id)
end

local function first(shape, above)
  local entry = redis.call("ZRANGE", KEY.pending_shape(shape), above, "+inf", "BYSCORE", "LIMIT", 0, 1, "WITHSCORES")
  return entry[1] and { id = entry[1], score = tonumber(entry[2]) } or nil
end

-- The first job of a shape that has waited past the bound. The head of each priority class is its oldest.
local function first_overdue(shape)
  local job = first(shape, "-inf")
  while job do
    local class = math.floor(job.score / CLASS)
    if now - (job.score - class * CLASS) >= limits.max_queue_bypass_ms then
      return job
    end
    job = first(shape, whole((class + 1) * CLASS))
  end
  return nil
end

local shapes, old_reasons = {}, {}
local listed = redis.call("HGETALL", KEY.shapes())
for i = 1, #listed, 2 do
  local device, ranks, most_hosts = string.match(listed[i], "^(%a+):(%d+):(%d+)$")
  local pool = device == "auto" and (fleet_has_cuda and "cuda" or "cpu") or device
  shapes[listed[i]] = {
    pool = pool, ranks = tonumber(ranks), most_hosts = tonumber(most_hosts), head = first(listed[i], "-inf"),
  }
  old_reasons[listed[i]] = listed[i + 1]
end

local function leave_waiting(name, reason)
  if old_reasons[name] ~= reason then
    redis.call("HSET", KEY.shapes(), name, reason)
  end
  shapes[name] = nil
end

local function next_shape()
  local best
  for name, shape in pairs(shapes) do
    if not best or is_before(shape.head.score, shape.head.id, shapes[best].head) then
      best = name
    end
  end
  return best
end

local placed, barriers = {}, {}
local name = next_shape()
while name do
  local shape = shapes[name]
  local where = shape.most_hosts == 1 and "one host" or "at most " .. shape.most_hosts .. " hosts"
  local needs = shape.ranks .. " free " .. shape.pool .. " devices on " .. where
  local barrier = barriers[shape.pool]
  local shares = fit("free", shape.pool, shape.ranks, shape.most_hosts)
  if barrier and not is_before(shape.head.score, shape.head.id, barrier) then
    leave_waiting(name, "waits for job " .. barrier.id .. ", which may not be overtaken any more")
  elseif shares then
    place(shape.head.id, shape.pool, shares)
    placed[#placed + 1] = shape.head.id
    shape.head = first(name, "-inf")
    if not shape.head then
      shapes[name] = nil
    end
  elseif fit("total", shape.pool, shape.ranks, shape.most_hosts) then
    local overdue = first_overdue(name)
    if overdue and (not barrier or is_before(overdue.score, overdue.id, barrier)) then
      barriers[shape.pool] = overdue
    end
    leave_waiting(name, "waits for " .. needs)
  else
    local wider = fit("total", shape.pool, shape.ranks, #fleet)
    local remedy = wider and "; max_hosts of " .. #wider .. " would do" or ""
    leave_waiting(name, "no hosts that take work have " .. needs .. ", even when idle" .. remedy)
  end
  name = next_shape()
end
return placed
