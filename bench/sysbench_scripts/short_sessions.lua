-- Sessions that log in, send one statement and disconnect. The script stops when its working directory contains a file
-- `stop`.

require("oltp_common") -- defines the command line options

function thread_init()
   driver = sysbench.sql.driver()
end

function thread_done()
end

function event()
   local session = driver:connect()
   session:query("SELECT 1")
   session:disconnect()
   local stop_file = io.open("stop")
   if stop_file then
      stop_file:close()
      return true
   end
end
