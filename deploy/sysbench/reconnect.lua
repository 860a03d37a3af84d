-- sysbench's oltp_point_select for servers that restart. A thread whose statement fails prints the error, connects
-- again and continues; sysbench counts the failed statements as `ignored errors`. Without this script, sysbench 1.0.20
-- stops at a lost connection, and with --mysql-ignore-errors=all it crashes. docs/operate/measure.md shows how to use it.

require("oltp_point_select")

local ffi = require("ffi")
ffi.cdef("int usleep(unsigned int microseconds);")
local RETRY_MICROSECONDS = 100000

function sysbench.hooks.sql_error_ignorable(failure)
   print(string.format("%s thread %d: error %d: %s", os.date("%H:%M:%S"), sysbench.tid, failure.sql_errno,
                       failure.sql_errmsg))
   return true
end

function sysbench.hooks.before_restart_event()
   pcall(close_statements)
   pcall(con.disconnect, con)
   local is_connected, connection = pcall(drv.connect, drv)
   while not is_connected do
      ffi.C.usleep(RETRY_MICROSECONDS)
      is_connected, connection = pcall(drv.connect, drv)
   end
   con = connection
   prepare_statements()
end
