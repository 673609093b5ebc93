-- Enter an upload of a project; the same content again keeps the first entry, and counts as a use of it.
-- COST: constant; the project's uploads, where their bytes have a quota.
-- USES: core jobs uploads quotas
-- ARGV: project: str, file: str, entry: str
-- RETURNS: the entry; nothing where the project would be over its quota

local most = quota_of(project, "upload_bytes")
local is_new = not has_upload(project, file)
if most and is_new and uploaded_bytes(project) + cjson.decode(entry).bytes > most then
  return ""
end
redis.call("HSETNX", KEY.uploads(project), file, entry)
redis.call("SADD", KEY.upload_holders(file), project)
use_upload(project, file)
return redis.call("HGET", KEY.uploads(project), file)
