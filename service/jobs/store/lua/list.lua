-- A page of jobs, newest first, that are in every named index and contain the text; their records come without the
-- field that is named. The page ends with the job that fills its bytes.
-- COST: `scan` jobs looked at, `limit` records, and their bytes to `page_bytes` and one record more.
-- USES: core jobs
-- ARGV: indexes: json, text: str, cursor: str, limit: int, scan: int, without: str, page_bytes: int
-- RETURNS: {last id looked at when there may be more, else "", flat record, flat record, …}

local CHUNK = 200

-- The smallest index is walked, the others are asked.
table.sort(indexes, function(a, b)
  local left, right = redis.call("ZCARD", KEY.jobs_by(a)), redis.call("ZCARD", KEY.jobs_by(b))
  return left < right or (left == right and a < b)
end)
local walked = #indexes > 0 and KEY.jobs_by(indexes[1]) or KEY.jobs()

local function matches(id)
  for i = 2, #indexes do
    if not redis.call("ZSCORE", KEY.jobs_by(indexes[i]), id) then
      return false
    end
  end
  if text == "" then
    return true
  end
  local words = redis.call("HMGET", KEY.job(id), "id", "name", "labels")
  return string.find(string.lower(table.concat(words, " ")), text, 1, true) ~= nil
end

local page, looked_at, size, from = { "" }, 0, 0, cursor == "" and "+" or "(" .. cursor
while true do
  local ids = redis.call("ZRANGE", walked, from, "-", "BYLEX", "REV", "LIMIT", 0, CHUNK)
  for _, id in ipairs(ids) do
    if #page > limit or looked_at >= scan or size >= page_bytes then
      page[1] = string.sub(from, 2)
      return page
    end
    looked_at = looked_at + 1
    from = "(" .. id
    if matches(id) then
      local record = view(id, without ~= "" and without)
      for _, value in ipairs(record) do
        size = size + #value
      end
      page[#page + 1] = record
    end
  end
  if #ids < CHUNK then
    return page
  end
end
