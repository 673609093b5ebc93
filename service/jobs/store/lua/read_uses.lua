-- What each project has used and holds, with its weight: projects that have used or hold anything, or weigh other than 1.
-- COST: the projects.
-- USES: core device_hours fair_share
-- ARGV: limits: json
-- RETURNS: {{project, decayed device-ms, devices held, weight}, …}

local now, known = now_ms(), {}
for _, key in ipairs({ KEY.uses(), KEY.weights() }) do
  for _, project in ipairs(redis.call("HKEYS", key)) do
    known[project] = true
  end
end
local rows = {}
for project in pairs(known) do
  local used, held = use_of(project, now)
  local weight = redis.call("HGET", KEY.weights(), project) or "1"
  rows[#rows + 1] = { project, string.format("%.17g", used), string.format("%d", held), weight }
end
return rows
