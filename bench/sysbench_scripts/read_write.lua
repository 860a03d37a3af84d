-- sysbench's oltp_read_write with two changes:
--
-- 1. The script stops when its working directory contains a file `stop`. sysbench then prints its counts.
-- 2. Each thread changes only its own rows. So no transaction waits for another, the database has no reason to fail one,
--    and any failure comes from the proxy. A thread skips the rows at the edges of its range, because a lock on a row may
--    also cover the gap before it.

require("oltp_read_write")

local read_write = event

function sysbench.rand.default(least, most)
   local share = math.floor((most - least + 1) / sysbench.opt.threads)
   return least + sysbench.tid * share + sysbench.rand.uniform(2, share - 3)
end

function event()
   read_write()
   local stop_file = io.open("stop")
   if stop_file then
      stop_file:close()
      return true
   end
end
