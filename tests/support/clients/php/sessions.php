<?php
// Sessions for client.php, with mysqli or PDO.
declare(strict_types=1);

/** The driver cannot do this; the message says what is missing. */
final class NotSupported extends RuntimeException
{
}

/** An error of the server or of the client library, with MySQL's code. */
final class SqlError extends RuntimeException
{
}

/** A value that is bytes, not text. */
final class Blob
{
    public function __construct(public readonly string $bytes)
    {
    }
}

/** One connection. Each `?` in a statement is a parameter. Rows are lists of values. */
abstract class Session
{
    protected mysqli|PDO $connection;

    abstract public function ping(): void;

    abstract public function text(string $sql, array $parameters = []): array;

    abstract public function prepared(string $sql, array $parameters = []): array;

    abstract public function stream(string $sql): iterable;

    abstract public function streamPrepared(string $sql): iterable;

    /** Runs several statements and returns their result sets. */
    abstract public function multi(string $sql): array;

    abstract public function begin(): void;

    public function commit(): void
    {
        $this->connection->commit();
    }

    public function rollback(): void
    {
        $this->connection->rollback();
    }

    /** Calls the driver and converts its errors to SqlError. */
    protected function tried(callable $action): mixed
    {
        try {
            return $action();
        } catch (mysqli_sql_exception | PDOException $error) {
            throw new SqlError($error->getMessage(), (int) ($error->errorInfo[1] ?? $error->getCode()));
        }
    }

    public function cursor(string $sql): iterable
    {
        throw new NotSupported('no server-side cursors');
    }

    public function changeUser(string $user, string $password): void
    {
        throw new NotSupported('no change of user');
    }

    public function user(): string
    {
        return explode('@', $this->text('select current_user()')[0][0])[0];
    }
}

final class MysqliSession extends Session
{
    public function __construct(string $password)
    {
        mysqli_report(MYSQLI_REPORT_ERROR | MYSQLI_REPORT_STRICT);
        $this->connection = mysqli_init();
        $this->connection->options(MYSQLI_OPT_INT_AND_FLOAT_NATIVE, 1);
        $this->connection->options(MYSQLI_OPT_LOCAL_INFILE, 1);
        $flags = plan('COMPRESS') ? MYSQLI_CLIENT_COMPRESS : 0;
        if (plan('CA')) {
            $this->connection->ssl_set(null, null, plan('CA'), null, null);
            $this->connection->options(MYSQLI_OPT_SSL_VERIFY_SERVER_CERT, 1);
            $flags |= MYSQLI_CLIENT_SSL;
        }
        $to = [plan('HOST'), plan('USER'), $password, plan('DATABASE'), (int) plan('PORT')];
        $this->tried(fn() => @$this->connection->real_connect(...[...$to, null, $flags]));
        $this->connection->set_charset('utf8mb4');
    }

    public function ping(): void
    {
        $this->tried(fn() => $this->connection->ping());
    }

    private function written(string $sql, array $parameters): string
    {
        $parts = explode('?', $sql);
        foreach ($parameters as $at => $value) {
            $text = match (true) {
                $value === null => 'null',
                $value instanceof Blob => "_binary'{$this->connection->real_escape_string($value->bytes)}'",
                is_string($value) => "'{$this->connection->real_escape_string($value)}'",
                default => json_encode($value),
            };
            $parts[$at] .= $text;
        }
        return implode('', $parts);
    }

    public function text(string $sql, array $parameters = []): array
    {
        $result = $this->tried(fn() => $this->connection->query($this->written($sql, $parameters)));
        return is_bool($result) ? [] : $result->fetch_all();
    }

    private function executed(string $sql, array $parameters): mysqli_stmt
    {
        return $this->tried(function () use ($sql, $parameters): mysqli_stmt {
            $statement = $this->connection->prepare($sql);
            $types = $values = [];
            foreach ($parameters as $value) {
                $types[] = $value instanceof Blob ? 'b' : (is_int($value) ? 'i' : (is_float($value) ? 'd' : 's'));
                $values[] = $value instanceof Blob ? null : $value;
            }
            if ($values) {
                $statement->bind_param(implode('', $types), ...$values);
            }
            foreach ($parameters as $at => $value) {
                if ($value instanceof Blob) {
                    $statement->send_long_data($at, $value->bytes); // in one packet, or several
                }
            }
            $statement->execute();
            return $statement;
        });
    }

    public function prepared(string $sql, array $parameters = []): array
    {
        $statement = $this->executed($sql, $parameters);
        $result = $this->tried(fn() => $statement->get_result());
        return $result ? $result->fetch_all() : [];
    }

    public function stream(string $sql): iterable
    {
        $result = $this->tried(fn() => $this->connection->query($sql, MYSQLI_USE_RESULT));
        while ($row = $result->fetch_row()) {
            yield $row;
        }
    }

    private function fetched(mysqli_stmt $statement): iterable
    {
        $statement->bind_result($n);
        while ($statement->fetch()) {
            yield [$n];
        }
    }

    public function streamPrepared(string $sql): iterable
    {
        yield from $this->fetched($this->executed($sql, []));
    }

    public function cursor(string $sql): iterable
    {
        $statement = $this->connection->prepare($sql);
        $statement->attr_set(MYSQLI_STMT_ATTR_CURSOR_TYPE, MYSQLI_CURSOR_TYPE_READ_ONLY);
        $statement->execute();
        yield from $this->fetched($statement);
    }

    public function multi(string $sql): array
    {
        return $this->tried(function () use ($sql): array {
            $found = [];
            $this->connection->multi_query($sql);
            do {
                if ($result = $this->connection->store_result()) {
                    $found[] = $result->fetch_all();
                }
            } while ($this->connection->more_results() && $this->connection->next_result());
            return $found;
        });
    }

    public function begin(): void
    {
        $this->connection->begin_transaction();
    }

    public function changeUser(string $user, string $password): void
    {
        $this->tried(fn() => @$this->connection->change_user($user, $password, plan('DATABASE')));
    }
}

final class PdoSession extends Session
{
    public function __construct(string $password)
    {
        $options = [
            PDO::ATTR_ERRMODE => PDO::ERRMODE_EXCEPTION,
            PDO::ATTR_DEFAULT_FETCH_MODE => PDO::FETCH_NUM,
            PDO::MYSQL_ATTR_LOCAL_INFILE => true,
            PDO::MYSQL_ATTR_COMPRESS => plan('COMPRESS') !== '',
        ];
        if (plan('CA')) {
            $options += [PDO::MYSQL_ATTR_SSL_CA => plan('CA'), PDO::MYSQL_ATTR_SSL_VERIFY_SERVER_CERT => true];
        }
        [$host, $port, $database] = array_map(plan(...), ['HOST', 'PORT', 'DATABASE']);
        $name = "mysql:host=$host;port=$port;dbname=$database;charset=utf8mb4";
        $this->connection = $this->tried(fn() => @new PDO($name, plan('USER'), $password, $options));
    }

    public function ping(): void
    {
        throw new NotSupported('no ping');
    }

    private function executed(string $sql, array $parameters, bool $prepared, bool $whole = true): PDOStatement
    {
        return $this->tried(function () use ($sql, $parameters, $prepared, $whole): PDOStatement {
            $this->connection->setAttribute(PDO::ATTR_EMULATE_PREPARES, !$prepared);
            $this->connection->setAttribute(PDO::MYSQL_ATTR_USE_BUFFERED_QUERY, $whole);
            $statement = $this->connection->prepare($sql);
            foreach ($parameters as $at => $value) {
                $kind = match (true) {
                    $value instanceof Blob => PDO::PARAM_LOB,
                    is_int($value) => PDO::PARAM_INT,
                    $value === null => PDO::PARAM_NULL,
                    default => PDO::PARAM_STR,
                };
                $bound = $value instanceof Blob ? $value->bytes : (is_float($value) ? json_encode($value) : $value);
                $statement->bindValue($at + 1, $bound, $kind);
            }
            $statement->execute();
            return $statement;
        });
    }

    private function rows(PDOStatement $statement): array
    {
        return $statement->columnCount() ? $statement->fetchAll() : [];
    }

    public function text(string $sql, array $parameters = []): array
    {
        return $this->rows($this->executed($sql, $parameters, false));
    }

    public function prepared(string $sql, array $parameters = []): array
    {
        return $this->rows($this->executed($sql, $parameters, true));
    }

    public function stream(string $sql): iterable
    {
        yield from $this->executed($sql, [], false, false);
    }

    public function streamPrepared(string $sql): iterable
    {
        yield from $this->executed($sql, [], true, false);
    }

    public function multi(string $sql): array
    {
        return $this->tried(function () use ($sql): array {
            $statement = $this->executed($sql, [], false);
            $found = [];
            do {
                if ($statement->columnCount()) {
                    $found[] = $statement->fetchAll();
                }
            } while ($statement->nextRowset());
            return $found;
        });
    }

    public function begin(): void
    {
        $this->connection->beginTransaction();
    }
}
