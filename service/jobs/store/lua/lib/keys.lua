-- API keys: which of them admit anybody.

-- Whether a key has expired, by the time of day.
local function expired(key)
  local ends = key.expires_at or cjson.null
  return ends ~= cjson.null and ends <= wall_ms()
end

-- The entry of a key that has not expired; nothing for one that has, or that there is not.
local function valid_entry(key_id)
  local entry = redis.call("HGET", KEY.api_keys(), key_id)
  return entry and not expired(cjson.decode(entry)) and entry or nil
end

-- The ids of the keys of a service account.
local function keys_of_account(name)
  local found = {}
  for _, text in ipairs(redis.call("HVALS", KEY.api_keys())) do
    local key = cjson.decode(text)
    if key.holder == "account" and key.name == name then
      found[#found + 1] = key.id
    end
  end
  return found
end
