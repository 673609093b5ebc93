-- How many jobs wait for each device that can be asked for, and for how long the oldest of them.
-- COST: the slices, of which there is one for each shape and priority that waits.
-- USES: core jobs queue
-- RETURNS: {{device, jobs, ms}, …}

local now = now_ms()

local groups = { auto = true, cuda = true, cpu = true }
for _, name in ipairs(redis.call("HKEYS", KEY.pending_groups())) do
  groups[name] = true
end

local depths = { auto = { jobs = 0, wait = 0 }, cuda = { jobs = 0, wait = 0 }, cpu = { jobs = 0, wait = 0 } }
for name in pairs(groups) do
  local depth = depths[parse_group(name)]
  for _, head in ipairs(redis.call("ZRANGE", KEY.pending_node(name, 0, 0, 0), 0, -1)) do
    local job = queue_fields(head)
    depth.jobs = depth.jobs + redis.call("ZCARD", KEY.pending_slice(job.shape, job.priority))
    depth.wait = math.max(depth.wait, now - tonumber(job.queued_at))
  end
end

local answer = {}
for i, device in ipairs({ "auto", "cuda", "cpu" }) do
  answer[i] = { device, whole(depths[device].jobs), whole(depths[device].wait) }
end
return answer
