-- The pending set and its slices by shape (device:ranks:hosts). Needs core, jobs.

local CLASS = 1e13

local function enqueue(id)
  local job = redis.call("HMGET", KEY.job(id), "priority", "queued_at", "shape")
  local score = -tonumber(job[1]) * CLASS + tonumber(job[2])
  redis.call("ZADD", KEY.pending(), whole(score), id)
  redis.call("ZADD", KEY.pending_shape(job[3]), whole(score), id)
  redis.call("HSETNX", KEY.shapes(), job[3], "waits for devices")
end

local function dequeue(id)
  if redis.call("ZREM", KEY.pending(), id) == 0 then
    return
  end
  local shape = field(id, "shape")
  redis.call("ZREM", KEY.pending_shape(shape), id)
  if redis.call("EXISTS", KEY.pending_shape(shape)) == 0 then
    redis.call("HDEL", KEY.shapes(), shape)
  end
end
