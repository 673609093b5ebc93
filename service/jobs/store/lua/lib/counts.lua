-- Counts what operators watch, for all processes together: metrics of service/jobs/monitoring/catalogue.py.

local function add_count(by, ...)
  redis.call("HINCRBY", KEY.counts(), table.concat({ ... }, "\t"), by)
end

local function observe(name, seconds)
  local bound = "+Inf"
  for _, each in ipairs(BUCKETS[name]) do
    if seconds <= tonumber(each) then
      bound = each
      break
    end
  end
  add_count(1, name .. "_bucket", bound)
  redis.call("HINCRBYFLOAT", KEY.counts(), name .. "_sum", string.format("%.3f", seconds))
end

-- An attempt ended. Its cause is the service's own word for it, never one of a user's program.
local function count_attempt(outcome, fault)
  local cause = fault and cjson.decode(fault).type
  add_count(1, "trivet_attempts_ended_total", outcome, CAUSES[cause] and cause or fault and "Other" or "None")
end
