-- Sessions that log in, ask once and leave. It ends when there is a file `stop` in its directory.

require("oltp_common") -- for its options

function thread_init()
   driver = sysbench.sql.driver()
end

function thread_done()
end

function event()
   local session = driver:connect()
   session:query("SELECT 1")
   session:disconnect()
   local told = io.open("stop")
   if told then
      told:close()
      return true
   end
end
