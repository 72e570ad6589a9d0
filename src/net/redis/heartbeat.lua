-- Registers a node, renews its lease, or ends it. All keys carry one hash tag.
-- KEYS: meta, nodes, lease of this node, blocks of which it became the only owner
-- ARGV: node (16 bytes), epoch, presence, load, address, lease ms, an epoch for an empty registry
-- A node's record: registration (8 bytes), epoch (16 hex digits), load (24), address. A registration
-- is the node's slot (2 bytes) and a generation (6) that only grows, big-endian. The lease's key ends
-- in the node's id in hexadecimal.
local meta, nodes, lease, sole = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local node, epoch, presence = ARGV[1], ARGV[2], ARGV[3]
local registry = redis.call('HGET', meta, 'epoch')
if not registry then
  registry = ARGV[7]
  redis.call('HSET', meta, 'epoch', registry)
end
local known = redis.call('HGET', nodes, node)
local live = known and redis.call('EXISTS', lease) == 1
if live and string.sub(known, 9, 24) > epoch then
  return {'superseded'}
end
local same = live and string.sub(known, 9, 24) == epoch
if presence == 'leaving' then
  if same or not live then
    redis.call('DEL', lease, sole)
  end
  return {'ok', registry, string.rep('\0', 8), {}}
end
local hints = {}
local registration
if same and presence == 'here' then
  registration = string.sub(known, 1, 8)
  hints = redis.call('LRANGE', sole, 0, -1)
else
  local slot, generation = nil, 0
  if known then
    slot, generation = string.sub(known, 1, 2), struct.unpack('>I6', known, 3)
  else
    local next = redis.call('HINCRBY', meta, 'slots', 1) - 1
    if next < 4096 then
      slot = struct.pack('>I2', next)
    else
      -- All slots are in use: one whose node has no lease.
      redis.call('HSET', meta, 'slots', 4096)
      local all = redis.call('HGETALL', nodes)
      local prefix = string.sub(lease, 1, #lease - 32)
      for i = 1, #all, 2 do
        local hex = string.gsub(all[i], '.', function(c) return string.format('%02x', string.byte(c)) end)
        if redis.call('EXISTS', prefix .. hex) == 0 then
          slot, generation = string.sub(all[i + 1], 1, 2), struct.unpack('>I6', all[i + 1], 3)
          redis.call('HDEL', nodes, all[i])
          break
        end
      end
      if not slot then
        return {'full'}
      end
    end
  end
  local time = redis.call('TIME')
  generation = math.max(generation + 1, time[1] * 1000 + math.floor(time[2] / 1000))
  registration = slot .. struct.pack('>I6', generation)
end
redis.call('DEL', sole)
redis.call('HSET', nodes, node, registration .. epoch .. ARGV[4] .. ARGV[5])
redis.call('SET', lease, registration, 'PX', ARGV[6])
return {'ok', registry, registration, hints}
