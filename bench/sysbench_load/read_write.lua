-- oltp_read_write as it comes with sysbench, but for two things.
--
-- It ends when there is a file `stop` in its directory, and prints what it has counted.
--
-- Each thread changes rows of its own: no transaction waits for another, so the database has no reason to fail one,
-- and whatever fails is the proxy's doing. Rows at the edges of a thread's share are left alone, since a lock on one row
-- may cover the gap before it.

require("oltp_read_write")

local read_write = event

function sysbench.rand.default(least, most)
   local share = math.floor((most - least + 1) / sysbench.opt.threads)
   return least + sysbench.tid * share + sysbench.rand.uniform(2, share - 3)
end

function event()
   read_write()
   local told = io.open("stop")
   if told then
      told:close()
      return true
   end
end
