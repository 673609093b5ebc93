-- What placement keeps projects to: the devices that they hold at once, and their device-hours in a window. Needs core,
-- jobs, queue, pending_search, fair_share, device_hours, and `limits` among the script's arguments.

-- By project, of those that have such quotas: what they may have and have.
local bounds = {}

local function read_bounds(project, now)
  local text = redis.call("HGET", KEY.placement_quotas(), project)
  if not text then
    return
  end
  local quotas = cjson.decode(text)
  local _, held, since = use_of(project, now)
  local bound = { devices = tonumber(quotas.devices), held = held }
  local most = tonumber(quotas.device_hours)
  if most then
    local by_hour, sum = device_hours_of(project, held, since, now, limits.quota_window_h)
    if sum >= most * HOUR_MS then
      local below_in = falls_below(by_hour, sum, most * HOUR_MS, now, limits.quota_window_h)
      bound.hours = { used = sum / HOUR_MS, most = most, window = limits.quota_window_h, below_in = below_in }
    end
  end
  bounds[project] = bound
end

-- How many more devices a project may hold.
local function room_of(project)
  local bound = bounds[project]
  if not bound then
    return math.huge
  elseif bound.hours then
    return 0
  end
  return bound.devices and math.max(0, bound.devices - bound.held) or math.huge
end

-- Find the first job of a project that has waited past the bound and needs more than its project may hold now: nothing
-- of the project behind it is placed, so that what others of the project give back is left for it. `regions` are those
-- of what fits on idle hosts.
local function bar_project(project, regions, now)
  local bound = bounds[project]
  if not bound or not bound.devices or bound.hours then
    return
  end
  local room, own = room_of(project), {}
  for _, region in ipairs(regions) do
    if region.project == project then
      own[#own + 1] = {
        group = region.group, project = project,
        holds = function(hosts)
          return math.min(region.capacity(hosts), bound.devices)
        end,
        above = function()
          return room
        end,
      }
    end
  end
  barred_by[project] = nil
  barred_by[project] = first_waiting_since(own, now - limits.max_queue_bypass_ms)
end

-- What those who ask why a job waits are told: the projects that quotas keep something from.
local function describe_bounds()
  local described
  for project, bound in pairs(bounds) do
    local barrier = barred_by[project]
    described = described or {}
    described[project] = {
      devices = bound.devices, held = bound.held,
      hours = bound.hours and {
        used = string.format("%.1f", bound.hours.used), most = bound.hours.most, window = bound.hours.window,
        below_in_h = bound.hours.below_in and math.ceil(bound.hours.below_in / HOUR_MS) or nil,
      },
      barrier = barrier and { id = barrier.id, score = barrier.score },
    }
  end
  return described
end
