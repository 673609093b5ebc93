-- The events of some jobs after a position in each: of a job at most `most`, of all together about `most_bytes`, each job
-- the same share of them. The job whose events come first gets one at least.
-- COST: `most` events of each job named, and their bytes to `most_bytes` and one event more of each job.
-- USES: core
-- ARGV: most: int, most_bytes: int, *cursors: str
-- RETURNS: {{id of a job that has any, an id from which on it has more or "", piece of its stream, piece, …}, …}

local READ_AT_ONCE = 32

local function after(job, position, count)
  return redis.call("XRANGE", KEY.job_events(job), "(" .. position, "+", "COUNT", count)
end

local found = {}
for i = 1, #cursors, 2 do
  local first = after(cursors[i], cursors[i + 1], 1)[1]
  if first then
    local ms, number = string.match(first[1], "(%d+)-(%d+)")
    local place = { ms = tonumber(ms), number = tonumber(number) }
    found[#found + 1] = { id = cursors[i], position = cursors[i + 1], first = first[1], place = place }
  end
end
table.sort(found, function(a, b)
  local one, other = a.place, b.place
  return one.ms < other.ms or (one.ms == other.ms and one.number < other.number)
end)

local left, share = most_bytes, most_bytes / math.max(#found, 1)

-- The row of a job: it ends with the event that fills the job's share, or what is left for all.
local function read(job)
  if left <= 0 then
    return { job.id, job.first }
  end
  local row, position, own, count = { job.id, "" }, job.position, share, 0
  while true do
    local events = after(job.id, position, math.min(READ_AT_ONCE, most - count))
    for i, event in ipairs(events) do
      local size = #event[2][4]
      position, count, left, own = event[1], count + 1, left - size, own - size
      if left <= 0 or own <= 0 or count == most then
        row[2], row[#row + 1] = position, { unpack(events, 1, i) }
        return row
      end
    end
    row[#row + 1] = events
    if #events < READ_AT_ONCE then
      return row
    end
  end
end

local rows = {}
for i, job in ipairs(found) do
  rows[i] = read(job)
end
return rows
