-- All nodes: the registry's epoch, then node, record and the milliseconds left of its lease, in turn.
-- KEYS: meta, nodes, lease of the node 00..0
local all = redis.call('HGETALL', KEYS[2])
local prefix = string.sub(KEYS[3], 1, #KEYS[3] - 32)
local out = {redis.call('HGET', KEYS[1], 'epoch') or ''}
for i = 1, #all, 2 do
  local hex = string.gsub(all[i], '.', function(c) return string.format('%02x', string.byte(c)) end)
  out[#out + 1] = all[i]
  out[#out + 1] = all[i + 1]
  out[#out + 1] = redis.call('PTTL', prefix .. hex)
end
return out
