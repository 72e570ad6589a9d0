-- Replaces lists of owners that are still as they were read.
-- KEYS: owners
-- ARGV: fingerprint, list as read, list to be (empty: none), in turn
local purged = 0
for i = 1, #ARGV, 3 do
  if redis.call('HGET', KEYS[1], ARGV[i]) == ARGV[i + 1] then
    if ARGV[i + 2] == '' then
      redis.call('HDEL', KEYS[1], ARGV[i])
    else
      redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 2])
    end
    purged = purged + 1
  end
end
return purged
