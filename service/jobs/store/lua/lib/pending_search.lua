-- Searches the index of pending jobs, by how many devices and hosts they need. Needs core, jobs, queue.
--
-- The order is priority; then, of one priority, first what has waited since `overdue_since` or longer, by age, then by
-- the share of the project, the smallest first, and age. Within a project that is the order of the scores, so the first
-- job of a node in the order of scores is also its first in this order.
--
-- A region says which shapes of one group are wanted: those of more ranks than `above(hosts)` (or 0) and of no more than
-- `holds(hosts)`, what so many hosts hold; neither ever falls as hosts grow. Nodes are opened in the order of their first
-- jobs, so the first wanted one is the answer. A node of few heads is not divided: its heads are looked at.

-- So many heads are looked at one by one: about as many reads as a node has squares.
local FEW = SIDE * SIDE

local nodes_read = 0
-- By project: the job behind which none of the same project is wanted.
local barred_by = {}
local shares, overdue_since = {}, -math.huge

local function turn(job)
  local class = math.floor(job.score / CLASS)
  local is_overdue = job.score - class * CLASS <= overdue_since
  return class, is_overdue and -1 or shares[job.project]
end

local function is_before(one, other)
  if one.project ~= other.project then
    local class, share = turn(one)
    local other_class, other_share = turn(other)
    if class ~= other_class then
      return class < other_class
    elseif share ~= other_share then
      return share < other_share
    end
  end
  return one.score < other.score or (one.score == other.score and one.id < other.id)
end

local function push(heap, item)
  local at = #heap + 1
  while at > 1 do
    local above = math.floor(at / 2)
    if not is_before(item, heap[above]) then
      break
    end
    heap[at] = heap[above]
    at = above
  end
  heap[at] = item
end

local function pop(heap)
  local top, last = heap[1], table.remove(heap)
  local size, at = #heap, 1
  if size == 0 then
    return top
  end
  while 2 * at <= size do
    local below = 2 * at
    if below < size and is_before(heap[below + 1], heap[below]) then
      below = below + 1
    end
    if not is_before(heap[below], last) then
      break
    end
    heap[at] = heap[below]
    at = below
  end
  heap[at] = last
  return top
end

local function is_barred(job)
  local barrier = barred_by[job.project]
  return barrier and is_before(barrier, job)
end

-- Put a node with its first job within the scores on the heap, unless nothing in its square can be wanted.
local function offer(heap, region, level, x, y, from, to)
  local width = SIDE ^ (LEVELS - level)
  local fewest, least = x * width + 1, y * width + 1
  local hosts, ranks = math.min((x + 1) * width, MOST_HOSTS), (y + 1) * width
  if fewest > hosts or fewest > ranks or least > region.holds(hosts)
    or ranks <= region.above(fewest) then
    return
  end
  nodes_read = nodes_read + 1
  local head = first_in(KEY.pending_node(region.group, level, x, y), from, to)
  if head then
    head.region, head.project, head.level, head.x, head.y = region, region.project, level, x, y
    head.wanted = ranks <= region.holds(fewest) and least > region.above(hosts)
    if not is_barred(head) then
      push(heap, head)
    end
  end
end

-- Put the heads of a node on the heap that its region wants, if there are few; else its squares.
local function open(heap, node, from, to)
  local region = node.region
  local key = KEY.pending_node(region.group, node.level, node.x, node.y)
  local heads = redis.call("ZRANGE", key, from, to, "BYSCORE", "LIMIT", 0, FEW + 1, "WITHSCORES")
  nodes_read = nodes_read + 1
  if #heads > 2 * FEW then
    for dx = 0, SIDE - 1 do
      for dy = 0, SIDE - 1 do
        offer(heap, region, node.level + 1, SIDE * node.x + dx, SIDE * node.y + dy, from, to)
      end
    end
    return
  end
  for i = 1, #heads, 2 do
    nodes_read = nodes_read + 1
    local _, ranks, hosts = parse_shape(field(heads[i], "shape"))
    local head = {
      id = heads[i], score = tonumber(heads[i + 1]), region = region, project = region.project, wanted = true,
    }
    if ranks <= region.holds(hosts) and ranks > region.above(hosts) and not is_barred(head) then
      push(heap, head)
    end
  end
end

-- The first pending job in order that one of the regions wants, of all scores or of those from … to, or nil.
local function first_within(regions, from, to)
  local heap = {}
  for _, region in ipairs(regions) do
    offer(heap, region, 0, 0, 0, from, to)
  end
  while #heap > 0 do
    local node = pop(heap)
    if node.wanted then
      return node
    end
    open(heap, node, from, to)
  end
  return nil
end

-- The lowest score, and no lower than this, of a pending job of any shape in these regions' groups.
local function lowest_score(regions, from)
  local lowest
  for _, region in ipairs(regions) do
    local head = first_in(KEY.pending_node(region.group, 0, 0, 0), from, "+inf")
    if head and (not lowest or head.score < lowest) then
      lowest = head.score
    end
  end
  return lowest
end

-- The first wanted job in order that has waited since `latest` (ms) or longer, by one search in each priority class
-- where any job has; there are 201 classes at most.
local function first_waiting_since(regions, latest)
  local lowest = lowest_score(regions, "-inf")
  while lowest do
    local class = math.floor(lowest / CLASS) * CLASS
    if lowest - class <= latest then
      local first = first_within(regions, whole(class), whole(class + latest))
      if first then
        return first
      end
    end
    lowest = lowest_score(regions, whole(class + CLASS))
  end
  return nil
end
