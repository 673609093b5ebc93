-- Searches the index of pending jobs, by how many devices and hosts they need. Needs core, jobs, queue.
--
-- A region says which shapes of one group are wanted: those of more ranks than `above(hosts)` (or 0) and of no more than
-- `holds(hosts)`, what so many hosts hold; neither ever falls as hosts grow. Nodes are opened in the order of their first
-- jobs, so the first wanted one is the answer.

local nodes_read = 0

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
    head.region, head.level, head.x, head.y = region, level, x, y
    head.wanted = ranks <= region.holds(fewest) and least > region.above(hosts)
    push(heap, head)
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
    for dx = 0, SIDE - 1 do
      for dy = 0, SIDE - 1 do
        offer(heap, node.region, node.level + 1, SIDE * node.x + dx, SIDE * node.y + dy, from, to)
      end
    end
  end
  return nil
end

-- The first pending job of any shape in these regions' groups whose score is no less.
local function first_from(regions, from)
  local found
  for _, region in ipairs(regions) do
    local head = first_in(KEY.pending_node(region.group, 0, 0, 0), from, "+inf")
    if head and (not found or is_before(head, found)) then
      found = head
    end
  end
  return found
end

-- The first wanted job in order that has waited since `latest` (ms) or longer. In each priority class, of which there
-- are 201 at most, age is the order: one search finds its oldest wanted job.
local function first_waiting_since(regions, latest)
  local head = first_from(regions, "-inf")
  while head do
    local class = math.floor(head.score / CLASS) * CLASS
    if head.score - class <= latest then
      local oldest = first_within(regions, whole(class), "(" .. whole(class + CLASS))
      if oldest and oldest.score - class <= latest then
        return oldest
      end
    end
    head = first_from(regions, whole(class + CLASS))
  end
  return nil
end
