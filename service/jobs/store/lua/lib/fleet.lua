-- Which pool the device `auto` stands for: cuda while any host draws it there, else cpu.

-- A host that is heard of draws `auto` to its CUDA devices. Only an operator ends a drain, so `auto` does not wait for
-- that; a failing host is tried again by itself.
local function draws_auto_to_cuda(cuda_count, is_drained)
  return cuda_count > 0 and not is_drained
end
