-- The pending set, and an index that finds the first job in order among those that fit, whatever else is pending.
-- Needs core, jobs.
--
-- Jobs of one shape (group:ranks:hosts, where the group is the device asked for, with the host that is avoided and the
-- project, where they are not the usual ones) and one priority form a slice, in order of age; only its head can be
-- next. A quadtree over the plane of hosts and ranks holds the heads: each node is a sorted set of the heads in its
-- square, and a square of side 4 has 16 below it. What fits is a region below a staircase (more hosts never hold fewer
-- ranks), so a search opens only nodes that the staircase cuts: at most about twice as many as the largest feasible
-- ranks and hosts together, however many shapes or jobs there are. Entering or removing a job writes 2·(LEVELS + 1)
-- keys at most, beside its slice.

local CLASS = 1e13
local SIDE, LEVELS = 4, 8
local MOST_HOSTS = 1024

local function parse_shape(shape)
  local group, ranks, hosts = string.match(shape, "^(.+):(%d+):(%d+)$")
  return group, tonumber(ranks), tonumber(hosts)
end

local function first_in(key, from, to)
  local entry = redis.call("ZRANGE", key, from, to, "BYSCORE", "LIMIT", 0, 1, "WITHSCORES")
  return entry[1] and { id = entry[1], score = tonumber(entry[2]) } or nil
end

local function show_head(shape, old, new)
  local group, ranks, hosts = parse_shape(shape)
  local x, y = hosts - 1, ranks - 1
  for level = LEVELS, 0, -1 do
    local node = KEY.pending_node(group, level, x, y)
    if old then
      redis.call("ZREM", node, old.id)
    end
    if new then
      redis.call("ZADD", node, whole(new.score), new.id)
    end
    x, y = math.floor(x / SIDE), math.floor(y / SIDE)
  end
end

-- Enter a job into its slice, or remove it (without a score), and keep the index true.
local function change_slice(id, shape, priority, score)
  local slice = KEY.pending_slice(shape, priority)
  local old = first_in(slice, "-inf", "+inf")
  if score then
    redis.call("ZADD", slice, whole(score), id)
  else
    redis.call("ZREM", slice, id)
  end
  local new = first_in(slice, "-inf", "+inf")
  -- The index has the heads alone, so a job behind one costs no write there.
  if (old and old.id) ~= (new and new.id) then
    show_head(shape, old, new)
  end
end

local DEFAULT_PROJECT = "default"

-- Jobs that avoid a host are a group of their own: they fit elsewhere than others. So are those of each project: their
-- turn comes with its share.
local function group_name(device, host, project)
  return device .. (host and "@" .. host or "") .. (project ~= DEFAULT_PROJECT and "/" .. project or "")
end

-- Device, host that is avoided or nil, project.
local function parse_group(group)
  local device, rest = string.match(group, "^(%a+)(.*)$")
  return device, string.match(rest, "^@([^/]+)"), string.match(rest, "/(.+)$") or DEFAULT_PROJECT
end

local function queue_fields(id)
  local job = redis.call("HMGET", KEY.job(id), "priority", "queued_at", "shape", "avoid", "project", "launcher")
  local device, rest = string.match(job[3], "^(%a+)(:.+)$")
  local group = group_name(device, job[4], job[5] or DEFAULT_PROJECT)
  return {
    priority = job[1], queued_at = job[2], group = group, shape = group .. rest, launcher = job[6] or nil,
  }
end

-- A job that a launcher gets devices for is pending, but not in the index: placement has none for it.
local function enqueue(id)
  local job = queue_fields(id)
  local score = -tonumber(job.priority) * CLASS + tonumber(job.queued_at)
  redis.call("ZADD", KEY.pending(), whole(score), id)
  if job.launcher then
    redis.call("ZADD", KEY.launching(job.launcher), whole(score), id)
    return
  end
  redis.call("HINCRBY", KEY.pending_groups(), job.group, 1)
  change_slice(id, job.shape, job.priority, score)
  wake_placement()
end

local function dequeue(id)
  if redis.call("ZREM", KEY.pending(), id) == 1 then
    local job = queue_fields(id)
    if job.launcher then
      redis.call("ZREM", KEY.launching(job.launcher), id)
      redis.call("HDEL", KEY.job(id), "allocating")
      return
    end
    if redis.call("HINCRBY", KEY.pending_groups(), job.group, -1) <= 0 then
      redis.call("HDEL", KEY.pending_groups(), job.group)
    end
    change_slice(id, job.shape, job.priority, nil)
    wake_placement()
  end
end
