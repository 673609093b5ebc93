-- Note why pending jobs have no devices of their launcher yet.
-- COST: the jobs named.
-- USES: core jobs
-- ARGV: launcher: str, reasons: json

for id, reason in pairs(reasons) do
  if redis.call("ZSCORE", KEY.launching(launcher), id) then
    redis.call("HSET", KEY.job(id), "allocating", reason)
  end
end
return 1
