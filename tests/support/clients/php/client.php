<?php
// Runs the steps of tests/support/clients/python/script.py with PHP's own library (mysqlnd): `php client.php mysqli|pdo`.
declare(strict_types=1);

require __DIR__ . '/sessions.php';

const DEADLINE = 20; // the server must notice the end of a session within these seconds
const SLEEP = 60; // seconds that a query takes unless it is killed

function plan(string $name): string
{
    return (string) getenv("MATRIX_$name");
}

function expect(mixed $got, mixed $wanted, string $what = 'got'): void
{
    if ($got !== $wanted) {
        $show = fn(mixed $value): string => substr((string) json_encode($value), 0, 120);
        throw new RuntimeException("$what: {$show($got)}, not {$show($wanted)}");
    }
}

/** Fails unless the action raises a MySQL error with this code. */
function expectError(int $code, callable $action): string
{
    try {
        $action();
    } catch (SqlError $error) {
        expect($error->getCode(), $code, $error->getMessage());
        return "error $code";
    }
    throw new RuntimeException("no error $code");
}

/**
 * Run `$body` in a child process; its argument is a function that sends a line to this process.
 * Returns the child's process id and the stream of its lines.
 */
function inChild(callable $body): array
{
    [$ours, $theirs] = stream_socket_pair(STREAM_PF_UNIX, STREAM_SOCK_STREAM, 0);
    $child = pcntl_fork();
    if ($child === 0) {
        fclose($ours);
        try {
            $body(fn(string $line) => fwrite($theirs, "$line\n"));
        } catch (Throwable $error) {
            fwrite($theirs, 'failed: ' . $error->getMessage() . "\n");
        }
        posix_kill(getmypid(), SIGKILL); // a normal exit would close the parent's connections, too
    }
    fclose($theirs);
    return [$child, $ours];
}

function killed(int $child): void
{
    posix_kill($child, SIGKILL);
    pcntl_waitpid($child, $status);
}

final class Script
{
    public function __construct(private string $driver)
    {
    }

    public function login(): string
    {
        $session = $this->open();
        return $session->user() . ' in ' . $session->text('select database()')[0][0];
    }

    public function wrong_password(): string
    {
        return expectError(1045, fn() => $this->open('not the password'));
    }

    public function ping(): string
    {
        $session = $this->open();
        $session->ping();
        expect($session->text('select 1'), [[1]]);
        $session->ping();
        return '';
    }

    public function query_text(): string
    {
        return $this->queries($this->open()->text(...), 'query_text');
    }

    public function query_prepared(): string
    {
        return $this->queries($this->open()->prepared(...), 'query_prepared');
    }

    private function queries(callable $run, string $table): string
    {
        $rows = array_map(
            fn(int $i): array => [$i, "Zeile $i 🌊", 2 ** 32 + $i, $i / 4.0, $i % 2 ? null : str_repeat('x', $i * 20)],
            range(0, 19),
        );
        $columns = "select id, name, big, ratio, note from $table";
        $run("drop table if exists $table");
        $run("create table $table (id int primary key, name varchar(200) character set utf8mb4, "
            . 'big bigint, ratio double, note text)');
        foreach ($rows as $row) {
            $run("insert into $table values (?, ?, ?, ?, ?)", $row);
        }
        expect($run("$columns order by id"), $rows);
        foreach (array_slice($rows, 0, 3) as $row) {
            expect($run("$columns where id = ?", [$row[0]]), [$row]);
        }
        expect($run("$columns where id = ?", [-1]), []);
        $run("update $table set name = ? where id >= ?", ['neu', 10]);
        $run("delete from $table where id = ?", [19]);
        expect($run("select count(*) from $table where name = ?", ['neu']), [[9]]);
        $long = (int) plan('LONG');
        expect($run("select repeat('y', $long)"), [[str_repeat('y', $long)]]);
        $absent = expectError(1146, fn() => $run('select * from absent'));
        $again = expectError(1062, fn() => $run("insert into $table values (?, 'x', 1, 1, null)", [1]));
        $run("drop table $table");
        return "20 rows, $absent, $again";
    }

    public function transactions(): string
    {
        [$session, $second] = [$this->open(), $this->open()];
        $session->text('drop table if exists tx');
        $session->text('create table tx (id int primary key) engine=innodb');
        foreach (['commit', 'rollback'] as $number => $end) {
            $session->begin();
            $session->text('insert into tx values (?)', [$number]);
            expect($session->text('select count(*) from tx'), [[$number + 1]]);
            expect($second->text('select count(*) from tx'), [[$number]]);
            $session->$end();
            expect($second->text('select count(*) from tx'), [[1]]);
        }
        $session->text('drop table tx');
        return '0 1 1';
    }

    public function rows_text(): string
    {
        return $this->summed($this->open()->stream(...), (int) plan('ROWS'));
    }

    public function rows_prepared(): string
    {
        return $this->summed($this->open()->streamPrepared(...), (int) plan('ROWS_PREPARED'));
    }

    private function summed(callable $stream, int $rows): string
    {
        [$count, $sum] = [0, 0];
        foreach ($stream("select n from numbers where n <= $rows") as [$n]) {
            $count++;
            $sum += $n;
        }
        expect([$count, $sum], [$rows, intdiv($rows * ($rows + 1), 2)]);
        return "$count rows";
    }

    public function blob_text(): string
    {
        return $this->blob($this->open()->text(...));
    }

    public function blob_prepared(): string
    {
        return $this->blob($this->open()->prepared(...));
    }

    private function blob(callable $run): string
    {
        $blob = random_bytes((int) plan('BLOB'));
        $digest = hash('sha256', $blob);
        $run('drop table if exists blobs');
        $run('create table blobs (id int primary key, data longblob)');
        $run('insert into blobs values (?, ?)', [1, new Blob($blob)]);
        [[$data, $there]] = $run('select data, sha2(data, 256) from blobs where id = ?', [1]);
        expect($there, $digest, 'digest by the server');
        expect(hash('sha256', $data), $digest, 'digest of what came back');
        $run('drop table blobs');
        return strlen($data) . ' bytes';
    }

    public function multi(): string
    {
        $session = $this->open();
        $values = $session->multi('select 1; drop table if exists multi; create table multi (id int); '
            . 'insert into multi values (1), (2); select count(*) from multi; drop table multi');
        expect($values, [[[1]], [[2]]]);
        $outcome = expectError(1146, fn() => $session->multi('select 1; select * from absent; select 2'));
        expect($session->text('select 3'), [[3]]);
        return "2 results, $outcome";
    }

    public function batch(): string
    {
        throw new NotSupported('no protocol of its own for batches');
    }

    public function cursor(): string
    {
        $session = $this->open();
        [$count, $sum] = [0, 0];
        foreach ($session->cursor('select n from numbers where n <= 500') as [$n]) { // the driver fetches one row at a time
            $count++;
            $sum += $n;
        }
        expect([$count, $sum], [500, 125250]);
        expect($session->text('select 1'), [[1]]);
        return '500 rows';
    }

    public function load_data(): string
    {
        $count = (int) plan('LOAD_ROWS');
        $session = $this->open();
        $session->text('drop table if exists loaded');
        $session->text('create table loaded (id int primary key, name varchar(50))');
        $session->text('load data local infile ? into table loaded', [plan('LOAD_FILE')]);
        $found = $session->text('select count(*), cast(sum(id) as signed) from loaded');
        expect($found, [[$count, intdiv($count * ($count - 1), 2)]]);
        $session->text('drop table loaded');
        return "$count rows";
    }

    public function change_user(): string
    {
        $session = $this->open();
        $session->text('set @mark = 1');
        foreach ([['OTHER_USER', 'OTHER_PASSWORD'], ['USER', 'PASSWORD']] as [$user, $password]) {
            $session->changeUser(plan($user), plan($password));
            expect([$session->user(), $session->text('select @mark')], [plan($user), [[null]]]);
        }
        $refused = $this->open();
        $wrong = fn() => $refused->changeUser(plan('OTHER_USER'), 'not the password');
        return 'there and back, ' . expectError(1045, $wrong);
    }

    public function reset(): string
    {
        throw new NotSupported('no reset of a connection');
    }

    public function kill(): string
    {
        [$child, $reader] = inChild(function (callable $say): void {
            $victim = $this->open();
            [[$number]] = $victim->text('select connection_id()');
            $this->lock($victim, "begun $number");
            $this->lock($victim, "gone $number");
            $say((string) $number);
            try {
                $victim->text("select release_lock('begun $number'), sleep(" . SLEEP . ')');
                $say('the query ended without an error');
            } catch (SqlError $error) {
                // The client library's own error codes begin at 2000: the connection was lost.
                $say($error->getCode() >= 2000 ? 'connection lost' : "error {$error->getCode()}");
            }
        });
        try {
            $number = trim((string) fgets($reader));
            $killer = $this->open();
            $this->lock($killer, "begun $number");
            $killer->text("kill $number");
            stream_set_timeout($reader, DEADLINE);
            $outcome = trim((string) fgets($reader));
            $this->lock($killer, "gone $number");
        } finally {
            killed($child);
        }
        expect(preg_match('/^(connection lost|error \d+)$/', $outcome), 1, $outcome);
        return $outcome;
    }

    public function cut(): string
    {
        [$child, $reader] = inChild(function (callable $say): void {
            $session = $this->open();
            [[$number]] = $session->text('select connection_id()');
            $this->lock($session, "gone $number");
            $count = 0;
            foreach ($session->stream("select n, repeat('x', 100) from numbers") as $row) {
                if (++$count === 1000) {
                    $say((string) $number);
                    sleep(SLEEP);
                }
            }
        });
        try {
            $gone = 'gone ' . trim((string) fgets($reader));
            $other = $this->open();
            $this->lock($other, $gone, 0);
        } finally {
            killed($child); // its socket is closed without COM_QUIT
        }
        $this->lock($other, $gone);
        expect($this->open()->text('select 1'), [[1]]);
        return '';
    }

    /** Wait for the lock and take it. If `$got` is 0, check that another session has it. */
    private function lock(Session $session, string $name, int $got = 1): void
    {
        expect($session->text("select get_lock('$name', " . DEADLINE * $got . ')'), [[$got]], $name);
    }

    private function open(?string $password = null): Session
    {
        return new $this->driver($password ?? plan('PASSWORD'));
    }
}

ini_set('memory_limit', '-1');
$script = new Script(['mysqli' => MysqliSession::class, 'pdo' => PdoSession::class][$argv[1]]);
foreach (explode(' ', plan('STEPS')) as $step) {
    $began = microtime(true);
    try {
        [$ok, $detail] = [true, $script->$step()];
    } catch (NotSupported $reason) {
        [$ok, $detail] = [null, $reason->getMessage()];
    } catch (Throwable $error) {
        $text = get_class($error) . " {$error->getCode()}: {$error->getMessage()}";
        [$ok, $detail] = [false, substr($text, 0, 300)];
    }
    $seconds = round(microtime(true) - $began, 3);
    echo json_encode(compact('step', 'ok', 'detail', 'seconds'), JSON_INVALID_UTF8_SUBSTITUTE), "\n";
}
