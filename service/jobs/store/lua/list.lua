-- A page of jobs, newest first, that match a filter and contain the text; their records come without the field that is
-- named. The page ends with the job that fills its bytes.
-- COST: `scan` jobs looked at, `limit` records, and their bytes to `page_bytes` and one record more.
-- USES: core jobs listing
-- ARGV: filters: json, text: str, cursor: str, limit: int, scan: int, without: str, page_bytes: int
-- RETURNS: {last id looked at when there may be more, else "", flat record, flat record, …}

local page, is_full, add = new_page(limit, without, page_bytes)
page[1] = walk_newest(filters, text, cursor, scan, is_full, add)
return page
