# Runs the steps of tests/support/clients/python/script.py with mysql2, which uses libmariadb.
require "digest"
require "json"
require "mysql2"
require "securerandom"

DEADLINE = 20 # the server must notice the end of a session within these seconds
SLEEP = 60 # seconds that a query takes unless it is killed

NotSupported = Class.new(StandardError)

def plan(name) = ENV["MATRIX_#{name}"].to_s

def expect(got, wanted, what = "got")
  raise "#{what}: #{got.inspect[0, 120]}, not #{wanted.inspect[0, 120]}" if got != wanted
end

def expect_error(code)
  yield
rescue Mysql2::Error => error
  expect(error.error_number, code, error.message)
  "error #{code}"
else
  raise "no error #{code}"
end

# One connection. Each `?` in a statement is a parameter.
class Session
  attr_reader :client

  def initialize(password = plan("PASSWORD"))
    tls = plan("CA").empty? ? {} : { sslca: plan("CA"), sslverify: true, ssl_mode: :verify_identity }
    @client = Mysql2::Client.new(
      host: plan("HOST"), port: plan("PORT").to_i, username: plan("USER"), password: password,
      database: plan("DATABASE"), encoding: "utf8mb4", as: :array, local_infile: true,
      flags: Mysql2::Client::MULTI_STATEMENTS, **tls
    )
  end

  def text(sql, parameters = [])
    parts = sql.split("?", -1)
    values = parameters.map { |value| written(value) } + [""]
    found = @client.query(parts.zip(values).flatten.join)
    found ? found.to_a : []
  end

  def written(value)
    case value
    when nil then "null"
    when String then (value.encoding == Encoding::BINARY ? "_binary" : "").b + "'#{@client.escape(value)}'".b
    else value.to_s
    end
  end

  def prepared(sql, parameters = [])
    found = @client.prepare(sql).execute(*parameters)
    found ? found.to_a : []
  end

  # Calls the block with each row, without keeping the rows.
  def stream(sql, &row) = @client.query(sql, stream: true, cache_rows: false).each(&row)

  def stream_prepared(sql, &row) = @client.prepare(sql).execute(stream: true, cache_rows: false).each(&row)

  def multi(sql)
    found = [@client.query(sql)]
    found << @client.store_result while @client.next_result
    found.compact.map(&:to_a)
  end

  def user = text("select current_user()")[0][0].split("@")[0]

  # Waits for the lock and takes it. If `got` is 0, checks that another session has it.
  def lock(name, got = 1) = expect(text("select get_lock('#{name}', #{DEADLINE * got})"), [[got]], name)
end

# Runs the block in a child process with a pipe to this process. Returns the child's id and the end to read from.
def in_child
  reader, out = IO.pipe
  child = fork do
    reader.close
    out.sync = true
    begin
      yield out
    rescue StandardError => error
      out.puts("failed: #{error.message}")
    end
    Process.kill(:KILL, Process.pid) # a normal exit would close the parent's connections, too
  end
  out.close
  [child, reader]
end

def killed(child)
  Process.kill(:KILL, child)
  Process.wait(child)
end

def queries(table, &run)
  rows = (0...20).map { |i| [i, "Zeile #{i} 🌊", 2**32 + i, i / 4.0, i.odd? ? nil : "x" * i * 20] }
  columns = "select id, name, big, ratio, note from #{table}"
  run.("drop table if exists #{table}")
  run.("create table #{table} (id int primary key, name varchar(200) character set utf8mb4, " \
       "big bigint, ratio double, note text)")
  rows.each { |row| run.("insert into #{table} values (?, ?, ?, ?, ?)", row) }
  expect(run.("#{columns} order by id"), rows)
  rows[0, 3].each { |row| expect(run.("#{columns} where id = ?", row[0, 1]), [row]) }
  expect(run.("#{columns} where id = ?", [-1]), [])
  run.("update #{table} set name = ? where id >= ?", ["neu", 10])
  run.("delete from #{table} where id = ?", [19])
  expect(run.("select count(*) from #{table} where name = ?", ["neu"]), [[9]])
  long = plan("LONG").to_i
  expect(run.("select repeat('y', #{long})"), [["y" * long]])
  absent = expect_error(1146) { run.("select * from absent") }
  again = expect_error(1062) { run.("insert into #{table} values (?, 'x', 1, 1, null)", [1]) }
  run.("drop table #{table}")
  "20 rows, #{absent}, #{again}"
end

def summed(rows)
  count = sum = 0
  yield("select n from numbers where n <= #{rows}", ->((n)) { count += 1; sum += n })
  expect([count, sum], [rows, rows * (rows + 1) / 2])
  "#{count} rows"
end

def blob(&run)
  blob = SecureRandom.bytes(plan("BLOB").to_i)
  digest = Digest::SHA256.hexdigest(blob)
  run.("drop table if exists blobs")
  run.("create table blobs (id int primary key, data longblob)")
  run.("insert into blobs values (?, ?)", [1, blob])
  ((data, there),) = run.("select data, sha2(data, 256) from blobs where id = ?", [1])
  expect(there, digest, "digest by the server")
  expect(Digest::SHA256.hexdigest(data), digest, "digest of what came back")
  run.("drop table blobs")
  "#{data.bytesize} bytes"
end

STEPS = {
  "login" => lambda {
    session = Session.new
    "#{session.user} in #{session.text("select database()")[0][0]}"
  },
  "wrong_password" => -> { expect_error(1045) { Session.new("not the password") } },
  "ping" => lambda {
    session = Session.new
    expect(session.client.ping, true)
    expect(session.text("select 1"), [[1]])
    expect(session.client.ping, true)
    ""
  },
  "query_text" => -> { queries("query_text", &Session.new.method(:text)) },
  "query_prepared" => -> { queries("query_prepared", &Session.new.method(:prepared)) },
  "transactions" => lambda {
    session, second = Session.new, Session.new
    session.text("drop table if exists tx")
    session.text("create table tx (id int primary key) engine=innodb")
    %w[commit rollback].each_with_index do |last, number|
      session.text("begin")
      session.text("insert into tx values (?)", [number])
      expect(session.text("select count(*) from tx"), [[number + 1]])
      expect(second.text("select count(*) from tx"), [[number]])
      session.text(last)
      expect(second.text("select count(*) from tx"), [[1]])
    end
    session.text("drop table tx")
    "0 1 1"
  },
  "rows_text" => -> { summed(plan("ROWS").to_i) { |sql, row| Session.new.stream(sql, &row) } },
  "rows_prepared" => -> { summed(plan("ROWS_PREPARED").to_i) { |sql, row| Session.new.stream_prepared(sql, &row) } },
  "blob_text" => -> { blob(&Session.new.method(:text)) },
  "blob_prepared" => -> { blob(&Session.new.method(:prepared)) },
  "multi" => lambda {
    session = Session.new
    values = session.multi("select 1; drop table if exists multi; create table multi (id int); " \
                           "insert into multi values (1), (2); select count(*) from multi; drop table multi")
    expect(values, [[[1]], [[2]]])
    outcome = expect_error(1146) { session.multi("select 1; select * from absent; select 2") }
    expect(session.text("select 3"), [[3]])
    "2 results, #{outcome}"
  },
  "batch" => -> { raise NotSupported, "no protocol of its own for batches" },
  "cursor" => -> { raise NotSupported, "no server-side cursors" },
  "load_data" => lambda {
    session, count = Session.new, plan("LOAD_ROWS").to_i
    session.text("drop table if exists loaded")
    session.text("create table loaded (id int primary key, name varchar(50))")
    session.text("load data local infile ? into table loaded", [plan("LOAD_FILE")])
    found = session.text("select count(*), cast(sum(id) as signed) from loaded")
    expect(found, [[count, count * (count - 1) / 2]])
    session.text("drop table loaded")
    "#{count} rows"
  },
  "change_user" => -> { raise NotSupported, "no change of user" },
  "reset" => -> { raise NotSupported, "no reset of a connection" },
  "kill" => lambda {
    child, reader = in_child do |out|
      victim = Session.new
      ((number,),) = victim.text("select connection_id()")
      victim.lock("begun #{number}")
      victim.lock("gone #{number}")
      out.puts(number)
      begin
        victim.text("select release_lock('begun #{number}'), sleep(#{SLEEP})")
        out.puts("the query ended without an error")
      rescue Mysql2::Error => error
        # The client library's own error codes begin at 2000: the connection was lost.
        out.puts(error.error_number >= 2000 ? "connection lost" : "error #{error.error_number}")
      end
    end
    begin
      number = reader.gets.chomp
      killer = Session.new
      killer.lock("begun #{number}")
      killer.text("kill #{number}")
      outcome = reader.gets.chomp
      killer.lock("gone #{number}")
    ensure
      killed(child)
    end
    expect(outcome.match?(/\A(connection lost|error \d+)\z/), true, outcome)
    outcome
  },
  "cut" => lambda {
    child, reader = in_child do |out|
      session, count = Session.new, 0
      ((number,),) = session.text("select connection_id()")
      session.lock("gone #{number}")
      session.stream("select n, repeat('x', 100) from numbers") do
        count += 1
        next if count < 1000

        out.puts(number)
        sleep(SLEEP)
      end
    end
    begin
      gone = "gone #{reader.gets.chomp}"
      other = Session.new
      other.lock(gone, 0)
    ensure
      killed(child) # its socket is closed without COM_QUIT
    end
    other.lock(gone)
    expect(Session.new.text("select 1"), [[1]])
    ""
  },
}.freeze

$stdout.sync = true
plan("STEPS").split.each do |step|
  began = Process.clock_gettime(Process::CLOCK_MONOTONIC)
  begin
    ok, detail = true, STEPS.fetch(step).call
  rescue NotSupported => reason
    ok, detail = nil, reason.message
  rescue StandardError => error
    ok, detail = false, "#{error.class}: #{error.message}"[0, 300]
  end
  seconds = (Process.clock_gettime(Process::CLOCK_MONOTONIC) - began).round(3)
  puts JSON.generate({ step: step, ok: ok, detail: detail.dup.force_encoding("UTF-8").scrub, seconds: seconds })
end
