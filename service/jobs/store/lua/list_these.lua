-- A page of the jobs that are named, in their order, as far as they match a filter and contain the text; their records
-- come without the field `without`, which is `spec` or none. The page ends with the job that fills its bytes.
-- COST: the jobs named, `limit` records, and their bytes to `page_bytes` and one record more.
-- USES: core jobs listing
-- ARGV: filters: json, text: str, limit: int, without: str, page_bytes: int, *ids: str
-- RETURNS: {how many of the names were looked at, flat record, flat record, …}

local page, is_full, add = new_page(limit, without, page_bytes)
page[1] = #ids
for i, id in ipairs(ids) do
  if is_full() then
    page[1] = i - 1
    return page
  elseif redis.call("EXISTS", KEY.job(id)) == 1 and matches(filters, text, id) then
    add(id)
  end
end
return page
