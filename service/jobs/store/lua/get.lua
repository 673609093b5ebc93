-- A job's record, with what it waits for.
-- COST: constant, beside the size of the record.
-- USES: core jobs
-- ARGV: job_id: str
-- RETURNS: flat fields and values

if redis.call("EXISTS", KEY.job(job_id)) == 0 then
  return no_such_job(job_id)
end
return view(job_id)
