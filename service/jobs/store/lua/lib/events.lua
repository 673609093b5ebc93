-- How many bytes the events have that attempts put into the streams of jobs. Needs core, jobs.

local READ_AT_ONCE = 16

-- A job's stream has so many more bytes, or fewer.
local function count_event_bytes(id, bytes)
  if bytes == 0 then
    return
  end
  redis.call("HINCRBY", KEY.job(id), "event_bytes", whole(bytes))
  if redis.call("HINCRBY", KEY.event_bytes(), project_of(id), whole(bytes)) == 0 then
    redis.call("HDEL", KEY.event_bytes(), project_of(id))
  end
end

-- The bytes that a job's stream may have: a job's most, or what those of its project leave, but always a few.
local function room_for_events(id, held, limits)
  local all = tonumber(redis.call("HGET", KEY.event_bytes(), project_of(id)) or 0)
  local left = math.max(limits.project_stream_bytes - (all - held), limits.least_stream_bytes)
  return math.min(limits.stream_bytes, left)
end

-- Drop the oldest events of a stream that has too many, or too many bytes; they are in the attempt's record, and readers
-- are told of the gap.
local function trim_events(id, limits)
  local stream, held = KEY.job_events(id), tonumber(field(id, "event_bytes") or 0)
  local excess, number = held - room_for_events(id, held, limits), redis.call("XLEN", stream) - limits.stream_cap
  while excess > 0 or number > 0 do
    local oldest, freed, kept = redis.call("XRANGE", stream, "-", "+", "COUNT", READ_AT_ONCE + 1), 0, nil
    for i = 1, #oldest - 1 do
      if excess > freed or number > 0 then
        freed, number, kept = freed + #oldest[i][2][4], number - 1, oldest[i + 1][1]
      end
    end
    if not kept then
      return -- the newest one always stays
    end
    redis.call("XTRIM", stream, "MINID", kept)
    count_event_bytes(id, -math.min(freed, held))
    held, excess = math.max(held - freed, 0), excess - freed
  end
end

local function forget_events(id)
  count_event_bytes(id, -tonumber(field(id, "event_bytes") or 0))
  redis.call("UNLINK", KEY.job_events(id))
end
