-- append_audit
-- Append entries to the audit log if they follow its newest one. A broker that has no entry takes any: the files have
-- the ones before.
-- COST: the entries.
-- USES: core
-- ARGV: number: int, previous: str, newest: str, *lines: str
-- RETURNS: how many entries the stream has, or 0 when nothing was appended; number and hash of the newest entry

local head = redis.call("HMGET", KEY.audit_head(), "number", "hash")
if head[1] and (head[1] ~= whole(number) or head[2] ~= previous) then
  return {0, head[1], head[2]}
end
for index, line in ipairs(lines) do
  redis.call("XADD", KEY.audit(), whole(number + index) .. "-0", "e", line)
end
redis.call("HSET", KEY.audit_head(), "number", whole(number + #lines), "hash", newest)
return {redis.call("XLEN", KEY.audit()), whole(number + #lines), newest}
