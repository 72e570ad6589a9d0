-- Adds a registration to the owners of keys, or removes it.
-- KEYS: owners, lanes, digests of each partition group, in turn; one hash tag for each group
-- ARGV: '+', '-' or '!' (remove, for somebody else), registration (8 bytes), sequence, settled; then for
-- each group how many keys, and their fingerprints (16 bytes each, each once)
-- Answers one string: for each key one byte with the number of its owners, its highest bit set where
-- the registration was removed, and their registrations.
-- owners: fingerprint -> registrations of 8 bytes. lanes: slot -> registration, settled. digests: slot
-- and partition -> registration, digest.
local op, mine = ARGV[1], ARGV[2]
local sequence, settled = tonumber(ARGV[3]), tonumber(ARGV[4])
local slot = string.sub(mine, 1, 2)
local sub = string.sub

-- Where `mine` has its slot in a list of registrations.
local function find(list)
  for at = 1, #list, 8 do
    if sub(list, at, at + 1) == slot then
      return at
    end
  end
end

-- Whether the batch is behind what its sender settled, or of an earlier registration.
local function late(lanes)
  local lane = redis.call('HGET', lanes, slot)
  local floor = settled
  if lane then
    local theirs = sub(lane, 1, 8)
    if theirs == mine then
      floor = math.max(floor, tonumber(sub(lane, 9)))
    elseif struct.unpack('>I6', theirs, 3) > struct.unpack('>I6', mine, 3) then
      return true
    end
  end
  if sequence <= floor then
    return true
  end
  local now = mine .. string.format('%.0f', floor)
  if now ~= lane then
    redis.call('HSET', lanes, slot, now)
  end
  return false
end

local function toggle(sums, print)
  local one, two = string.byte(print, 1, 2)
  local partition = one * 4 + math.floor(two / 64)
  local high, low = struct.unpack('>I4I4', print, 9)
  local sum = sums[partition]
  if sum then
    sum[1], sum[2] = bit.bxor(sum[1], high), bit.bxor(sum[2], low)
  else
    sums[partition] = {high, low}
  end
end

local function apply(digests, sums)
  for partition, sum in pairs(sums) do
    local field = slot .. struct.pack('>I2', partition)
    local kept = redis.call('HGET', digests, field)
    local high, low = sum[1], sum[2]
    if kept and sub(kept, 1, 8) == mine then
      local a, b = struct.unpack('>I4I4', kept, 9)
      high, low = bit.bxor(high, a), bit.bxor(low, b)
    end
    redis.call('HSET', digests, field, mine .. struct.pack('>I4I4', high, low))
  end
end

local out, at = {}, 5
for group = 1, #KEYS, 3 do
  local owners, lanes, digests = KEYS[group], KEYS[group + 1], KEYS[group + 2]
  if op ~= '!' and late(lanes) then
    return redis.error_reply('LATE the sender had settled this batch')
  end
  local count, sums = tonumber(ARGV[at]), {}
  at = at + 1
  for from = at, at + count - 1, 1000 do
    local to = math.min(from + 999, at + count - 1)
    local lists = redis.call('HMGET', owners, unpack(ARGV, from, to))
    local set, gone = {}, {}
    for i = from, to do
      local print, list = ARGV[i], lists[i - from + 1]
      local found = list and find(list)
      local same = found and sub(list, found, found + 7) == mine
      local new = list or ''
      if op == '+' then
        if found then
          new = sub(list, 1, found - 1) .. mine .. sub(list, found + 8)
        else
          -- Nobody tells 64 owners from more; the oldest goes.
          new = sub(new, #new >= 512 and 9 or 1) .. mine
        end
        if not same then
          toggle(sums, print)
          set[#set + 1] = print
          set[#set + 1] = new
        end
      elseif found and (same or op == '-') then
        new = sub(list, 1, found - 1) .. sub(list, found + 8)
        if same then
          toggle(sums, print)
        end
        if new == '' then
          gone[#gone + 1] = print
        else
          set[#set + 1] = print
          set[#set + 1] = new
        end
      end
      out[#out + 1] = string.char(#new / 8 + ((same and op ~= '+') and 128 or 0))
      out[#out + 1] = new
    end
    if #set > 0 then
      redis.call('HSET', owners, unpack(set))
    end
    if #gone > 0 then
      redis.call('HDEL', owners, unpack(gone))
    end
  end
  at = at + count
  apply(digests, sums)
end
return table.concat(out)
