-- Make a worker the one that asks a launcher for devices for hold_ms, or let it stay that: workers end without notice.
-- COST: constant.
-- USES: core
-- ARGV: launcher: str, worker: str, hold_ms: int
-- RETURNS: 1 when it is that worker, else 0

local holder = redis.call("GET", KEY.launcher_holder(launcher))
if holder and holder ~= worker then
  return 0
end
redis.call("SET", KEY.launcher_holder(launcher), worker, "PX", hold_ms)
return 1
