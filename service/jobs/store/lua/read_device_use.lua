-- What a project holds and has used of devices.
-- COST: the hours of the window.
-- USES: core device_hours fair_share
-- ARGV: limits: json, project: str
-- RETURNS: {devices held, device-ms in the window}

local now = now_ms()
local _, held, since = use_of(project, now)
local _, sum = device_hours_of(project, held, since, now, limits.quota_window_h)
return { whole(held), whole(sum) }
