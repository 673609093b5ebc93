-- Jobs by the indexes that they are in. A filter has `within`, a list of groups of indexes, of each of which a job is in
-- one at least, and `outside`, indexes that it is in none of. Needs core, jobs.

local CHUNK = 200

local function size_of(group)
  local size = 0
  for _, index in ipairs(group) do
    size = size + redis.call("ZCARD", KEY.jobs_by(index))
  end
  return size
end

local function is_in_one(group, id)
  for _, index in ipairs(group) do
    if redis.call("ZSCORE", KEY.jobs_by(index), id) then
      return true
    end
  end
  return false
end

local function matches(filters, text, id)
  for _, group in ipairs(filters.within) do
    if not is_in_one(group, id) then
      return false
    end
  end
  if is_in_one(filters.outside, id) then
    return false
  elseif text == "" then
    return true
  end
  -- Only Python folds letters beyond ASCII. Jobs that were accepted before it did have no such field.
  local own, folded, name, labels = unpack(redis.call("HMGET", KEY.job(id), "id", "folded", "name", "labels"))
  local words = own .. " " .. (folded or string.lower(name .. " " .. labels))
  return string.find(words, text, 1, true) ~= nil
end

-- The newest `most` ids below `from` of those in one of the keys, which have no job in common.
local function newest_of(keys, from, most)
  local ids = {}
  for _, key in ipairs(keys) do
    for _, id in ipairs(redis.call("ZRANGE", key, from, "-", "BYLEX", "REV", "LIMIT", 0, most)) do
      ids[#ids + 1] = id
    end
  end
  if #keys > 1 then
    table.sort(ids, function(a, b) return a > b end)
  end
  return { unpack(ids, 1, math.min(#ids, most)) }
end

-- The keys of the smallest group, which is walked while the others are asked; the key of all jobs without any.
local function keys_to_walk(filters)
  local smallest, size
  for _, group in ipairs(filters.within) do
    local its_size = size_of(group)
    if not size or its_size < size then
      smallest, size = group, its_size
    end
  end
  if not smallest then
    return { KEY.jobs() }
  end
  local keys = {}
  for i, index in ipairs(smallest) do
    keys[i] = KEY.jobs_by(index)
  end
  return keys
end

-- Take the jobs that match, newest first, from the one after `cursor` on until it is enough, or `scan` were looked at.
-- Returns the last one that was looked at when there may be more, else "".
local function walk_newest(filters, text, cursor, scan, is_enough, take)
  local keys, looked_at, last = keys_to_walk(filters), 0, cursor
  while looked_at < scan do
    local most = math.min(CHUNK, scan - looked_at)
    local ids = newest_of(keys, last == "" and "+" or "(" .. last, most)
    for _, id in ipairs(ids) do
      if is_enough() then
        return last
      end
      looked_at, last = looked_at + 1, id
      if matches(filters, text, id) then
        take(id)
      end
    end
    if #ids < most then
      return ""
    end
  end
  return last
end

-- A page that records are added to until it has `limit` of them, or their bytes are `page_bytes` or more.
local function new_page(limit, without, page_bytes)
  local read = without == "spec" and brief_view or view
  local page, size = { "" }, 0
  local function is_full()
    return #page > limit or size >= page_bytes
  end
  local function add(id)
    local record = read(id)
    for _, value in ipairs(record) do
      size = size + #value
    end
    page[#page + 1] = record
  end
  return page, is_full, add
end
