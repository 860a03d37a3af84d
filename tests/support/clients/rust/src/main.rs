//! Runs the steps of tests/support/clients/python/script.py with sqlx.

use std::fmt::Write as _;
use std::future::Future;
use std::time::{Duration, Instant};

use futures_util::TryStreamExt as _;
use rand::RngCore as _;
use sha2::{Digest as _, Sha256};
use sqlx::mysql::{MySqlConnectOptions, MySqlConnection, MySqlRow, MySqlSslMode};
use sqlx::{AssertSqlSafe, Connection as _, Executor as _, Row as _};

const DEADLINE: Duration = Duration::from_secs(20); // the server must notice an event within this time
const SLEEP: u32 = 60; // seconds that a query takes unless it is killed

type Outcome<T = String> = Result<T, Failure>;

enum Failure {
    /// sqlx lacks this feature.
    NotSupported(&'static str),
    /// A result differs from the expected one.
    Wrong(String),
    Sqlx(sqlx::Error),
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NotSupported(reason) => f.write_str(reason),
            Self::Wrong(what) => f.write_str(what),
            Self::Sqlx(error) => write!(f, "{error}"),
        }
    }
}

impl From<sqlx::Error> for Failure {
    fn from(error: sqlx::Error) -> Self {
        Self::Sqlx(error)
    }
}

#[derive(Clone, Copy)]
enum Protocol {
    Text,
    Prepared,
}

struct Plan {
    options: MySqlConnectOptions,
    rows: u64,
    rows_prepared: u64,
    blob: usize,
    long: usize,
}

fn setting(name: &str) -> String {
    std::env::var(format!("MATRIX_{name}")).unwrap_or_default()
}

fn number<T: std::str::FromStr>(name: &str) -> Outcome<T> {
    setting(name).parse().map_err(|_| Failure::Wrong(format!("MATRIX_{name} is no number")))
}

impl Plan {
    fn read() -> Outcome<Self> {
        let options = MySqlConnectOptions::new()
            .host(&setting("HOST"))
            .port(number("PORT")?)
            .username(&setting("USER"))
            .password(&setting("PASSWORD"))
            .database(&setting("DATABASE"));
        let ca = setting("CA");
        let options = if ca.is_empty() {
            options.ssl_mode(MySqlSslMode::Disabled)
        } else {
            options.ssl_mode(MySqlSslMode::VerifyIdentity).ssl_ca(ca)
        };
        Ok(Self {
            options,
            rows: number("ROWS")?,
            rows_prepared: number("ROWS_PREPARED")?,
            blob: number("BLOB")?,
            long: number("LONG")?,
        })
    }

    async fn open(&self) -> Outcome<MySqlConnection> {
        Ok(MySqlConnection::connect_with(&self.options).await?)
    }

    async fn step(&self, name: &str) -> Outcome {
        match name {
            "login" => self.login().await,
            "wrong_password" => self.wrong_password().await,
            "ping" => self.ping().await,
            "query_text" => self.queries(Protocol::Text, name).await,
            "query_prepared" => self.queries(Protocol::Prepared, name).await,
            "transactions" => self.transactions().await,
            "rows_text" => self.big_result(Protocol::Text, self.rows).await,
            "rows_prepared" => self.big_result(Protocol::Prepared, self.rows_prepared).await,
            "blob_text" => self.big_value(Protocol::Text).await,
            "blob_prepared" => self.big_value(Protocol::Prepared).await,
            "multi" => self.multi().await,
            "batch" => Err(Failure::NotSupported("no protocol of its own for batches")),
            "cursor" => Err(Failure::NotSupported("no server-side cursors")),
            "load_data" => Err(Failure::NotSupported("no LOAD DATA LOCAL")),
            "change_user" => Err(Failure::NotSupported("no change of user")),
            "reset" => Err(Failure::NotSupported("no reset of a connection")),
            "kill" => self.kill().await,
            "cut" => self.cut().await,
            _ => Err(Failure::Wrong(format!("there is no step {name}"))),
        }
    }

    async fn login(&self) -> Outcome {
        let mut session = self.open().await?;
        let account: String = session.fetch_one(sqlx::raw_sql("select current_user()")).await?.get(0);
        let database: String = session.fetch_one(sqlx::raw_sql("select database()")).await?.get(0);
        let outcome = format!("{} in {database}", account.split('@').next().unwrap_or_default());
        session.close().await?;
        Ok(outcome)
    }

    async fn wrong_password(&self) -> Outcome {
        let options = self.options.clone().password("not the password");
        want_error(1045, MySqlConnection::connect_with(&options).await)
    }

    async fn ping(&self) -> Outcome {
        let mut session = self.open().await?;
        session.ping().await?;
        expect_number(&mut session, "select 1", 1).await?;
        session.ping().await?;
        session.close().await?;
        Ok(String::new())
    }

    async fn queries(&self, protocol: Protocol, table: &str) -> Outcome {
        let mut session = self.open().await?;
        let s = &mut session;
        let rows: Vec<Line> = (0..20).map(Line::new).collect();
        run(s, protocol, &format!("drop table if exists {table}"), &[]).await?;
        let create = format!(
            "create table {table} (id int primary key, name varchar(200) character set utf8mb4, \
             big bigint, ratio double, note text)"
        );
        run(s, protocol, &create, &[]).await?;
        let insert = format!("insert into {table} values (?, ?, ?, ?, ?)");
        for row in &rows {
            run(s, protocol, &insert, &row.values()).await?;
        }
        let columns = format!("select id, name, big, ratio, note from {table}");
        expect(&lines(&run(s, protocol, &format!("{columns} order by id"), &[]).await?), &rows)?;
        let by_id = format!("{columns} where id = ?");
        for row in &rows[..3] {
            let found = run(s, protocol, &by_id, &[Value::Int(row.id.into())]).await?;
            expect(lines(&found).as_slice(), std::slice::from_ref(row))?;
        }
        expect(lines(&run(s, protocol, &by_id, &[Value::Int(-1)]).await?).as_slice(), &[])?;
        let update = format!("update {table} set name = ? where id >= ?");
        run(s, protocol, &update, &[Value::Text("neu".into()), Value::Int(10)]).await?;
        run(s, protocol, &format!("delete from {table} where id = ?"), &[Value::Int(19)]).await?;
        let count = format!("select count(*) from {table} where name = ?");
        let count = run(s, protocol, &count, &[Value::Text("neu".into())]).await?;
        expect(&one(&count)?.get::<i64, _>(0), &9)?;
        let long = format!("select repeat('y', {})", self.long);
        let long = run(s, protocol, &long, &[]).await?;
        expect(&one(&long)?.get::<String, _>(0), &"y".repeat(self.long))?;
        let absent = want_error(1146, run(s, protocol, "select * from absent", &[]).await)?;
        let again = format!("insert into {table} values (?, 'x', 1, 1, null)");
        let duplicate = want_error(1062, run(s, protocol, &again, &[Value::Int(1)]).await)?;
        run(s, protocol, &format!("drop table {table}"), &[]).await?;
        session.close().await?;
        Ok(format!("20 rows, {absent}, {duplicate}"))
    }

    async fn transactions(&self) -> Outcome {
        let (mut session, mut second) = (self.open().await?, self.open().await?);
        session.execute("drop table if exists tx").await?;
        session.execute("create table tx (id int primary key) engine=innodb").await?;
        for before in 0..2 {
            let mut transaction = session.begin().await?;
            sqlx::query("insert into tx values (?)").bind(before).execute(&mut *transaction).await?;
            expect_number(&mut transaction, "select count(*) from tx", before + 1).await?;
            expect_number(&mut second, "select count(*) from tx", before).await?;
            if before == 0 {
                transaction.commit().await?;
            } else {
                transaction.rollback().await?;
            }
            expect_number(&mut second, "select count(*) from tx", 1).await?;
        }
        session.execute("drop table tx").await?;
        session.close().await?;
        second.close().await?;
        Ok("0 1 1".into())
    }

    async fn big_result(&self, protocol: Protocol, rows: u64) -> Outcome {
        let mut session = self.open().await?;
        let sql = format!("select n from numbers where n <= {rows}");
        let mut found = match protocol {
            Protocol::Text => sqlx::raw_sql(AssertSqlSafe(sql)).fetch(&mut session),
            Protocol::Prepared => sqlx::query(AssertSqlSafe(sql)).fetch(&mut session),
        };
        let (mut count, mut sum) = (0, 0);
        while let Some(row) = found.try_next().await? {
            count += 1;
            sum += u64::try_from(row.get::<i32, _>(0)).unwrap_or_default();
        }
        drop(found);
        expect(&(count, sum), &(rows, rows * (rows + 1) / 2))?;
        session.close().await?;
        Ok(format!("{count} rows"))
    }

    async fn big_value(&self, protocol: Protocol) -> Outcome {
        let mut session = self.open().await?;
        let mut blob = vec![0; self.blob];
        rand::rng().fill_bytes(&mut blob);
        let digest = hex(&Sha256::digest(&blob));
        session.execute("drop table if exists blobs").await?;
        session.execute("create table blobs (id int primary key, data longblob)").await?;
        let insert = "insert into blobs values (?, ?)";
        run(&mut session, protocol, insert, &[Value::Int(1), Value::Bytes(blob)]).await?;
        let stored = "select sha2(data, 256) from blobs where id = ?";
        let stored = run(&mut session, protocol, stored, &[Value::Int(1)]).await?;
        expect(&one(&stored)?.get::<String, _>(0), &digest)?;
        // In the text protocol sqlx mistakes a row that starts with such a long value for the end of the rows.
        let (part, note) = match protocol {
            Protocol::Text => (self.blob.div_ceil(2), ", read in halves: the driver cannot read more"),
            Protocol::Prepared => (self.blob, ""),
        };
        let mut data = Vec::new();
        while data.len() < self.blob {
            let begin = data.len() + 1;
            let select = format!("select substring(data, {begin}, {part}) from blobs where id = ?");
            let rows = run(&mut session, protocol, &select, &[Value::Int(1)]).await?;
            let read: Vec<u8> = one(&rows)?.get(0);
            if read.is_empty() {
                return Err(Failure::Wrong(format!("{} bytes received", data.len())));
            }
            data.extend(read);
        }
        expect(&hex(&Sha256::digest(&data)), &digest)?;
        session.execute("drop table blobs").await?;
        session.close().await?;
        Ok(format!("{} bytes{note}", data.len()))
    }

    async fn multi(&self) -> Outcome {
        let mut session = self.open().await?;
        let sql = "select 1; drop table if exists multi; create table multi (id int); \
                   insert into multi values (1), (2); select count(*) from multi; drop table multi";
        let rows = sqlx::raw_sql(sql).fetch_all(&mut session).await?;
        let values: Vec<i64> = rows.iter().map(|row| row.get_unchecked(0)).collect();
        expect(&values, &vec![1, 2])?;
        let broken = sqlx::raw_sql("select 1; select * from absent; select 2");
        let outcome = want_error(1146, broken.fetch_all(&mut session).await)?;
        expect_number(&mut session, "select 3", 3).await?;
        session.close().await?;
        Ok(format!("2 results, {outcome}"))
    }

    async fn kill(&self) -> Outcome {
        let (mut victim, mut killer) = (self.open().await?, self.open().await?);
        let id = value(&mut victim, "select connection_id()").await?;
        let (begun, gone) = (format!("begun {id}"), format!("gone {id}"));
        lock(&mut victim, &begun).await?;
        lock(&mut victim, &gone).await?;
        let sleep = format!("select release_lock('{begun}'), sleep({SLEEP})");
        let sleeping =
            tokio::spawn(async move { victim.fetch_all(sqlx::raw_sql(AssertSqlSafe(sleep))).await });
        lock(&mut killer, &begun).await?;
        killer.execute(sqlx::raw_sql(AssertSqlSafe(format!("kill {id}")))).await?;
        let Ok(Ok(ended)) = tokio::time::timeout(DEADLINE, sleeping).await else {
            return Err(Failure::Wrong("the query goes on".into()));
        };
        let outcome = match ended {
            Err(sqlx::Error::Database(answer)) => {
                format!("error {}", answer.downcast_ref::<sqlx::mysql::MySqlDatabaseError>().number())
            }
            Err(sqlx::Error::Io(_)) => "connection lost".into(),
            other => return Err(Failure::Wrong(format!("the query ended with {other:?}"))),
        };
        lock(&mut killer, &gone).await?;
        killer.close().await?;
        Ok(outcome)
    }

    async fn cut(&self) -> Outcome {
        let (mut session, mut other) = (self.open().await?, self.open().await?);
        let gone = format!("gone {}", value(&mut session, "select connection_id()").await?);
        lock(&mut session, &gone).await?;
        let mut found = sqlx::raw_sql("select n, repeat('x', 100) from numbers").fetch(&mut session);
        for _ in 0..1000 {
            if found.try_next().await?.is_none() {
                return Err(Failure::Wrong("fewer than 1000 rows".into()));
            }
        }
        drop(found);
        expect_number(&mut other, &format!("select get_lock('{gone}', 0)"), 0).await?;
        drop(session); // closes the socket without COM_QUIT
        lock(&mut other, &gone).await?;
        other.close().await?;
        let mut fresh = self.open().await?;
        expect_number(&mut fresh, "select 1", 1).await?;
        fresh.close().await?;
        Ok(String::new())
    }
}

/// A row of the table of the query steps.
#[derive(Debug, Clone, PartialEq)]
struct Line {
    id: i32,
    name: String,
    big: i64,
    ratio: f64,
    note: Option<String>,
}

impl Line {
    fn new(id: i32) -> Self {
        let length = usize::try_from(id).unwrap_or_default() * 20;
        Self {
            id,
            name: format!("Zeile {id} 🌊"),
            big: (1 << 32) + i64::from(id),
            ratio: f64::from(id) / 4.0,
            note: (id % 2 == 0).then(|| "x".repeat(length)),
        }
    }

    fn values(&self) -> [Value; 5] {
        [
            Value::Int(self.id.into()),
            Value::Text(self.name.clone()),
            Value::Int(self.big),
            Value::Double(self.ratio),
            self.note.clone().map_or(Value::Null, Value::Text),
        ]
    }
}

fn lines(rows: &[MySqlRow]) -> Vec<Line> {
    let line = |row: &MySqlRow| Line {
        id: row.get(0),
        name: row.get(1),
        big: row.get(2),
        ratio: row.get(3),
        note: row.get(4),
    };
    rows.iter().map(line).collect()
}

enum Value {
    Null,
    Int(i64),
    Double(f64),
    Text(String),
    Bytes(Vec<u8>),
}

impl Value {
    /// The value in SQL. The texts of the steps need no escaping.
    fn literal(&self) -> String {
        match self {
            Self::Null => "null".into(),
            Self::Int(value) => value.to_string(),
            Self::Double(value) => value.to_string(),
            Self::Text(value) => format!("'{value}'"),
            Self::Bytes(value) => format!("x'{}'", hex(value)),
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        let _ = write!(text, "{byte:02x}"); // writing to a String cannot fail
        text
    })
}

/// Run a statement with parameters; return all rows. sqlx has no function that inserts values into the text.
async fn run(
    session: &mut MySqlConnection,
    protocol: Protocol,
    sql: &str,
    values: &[Value],
) -> sqlx::Result<Vec<MySqlRow>> {
    match protocol {
        Protocol::Text => {
            let mut parts = sql.split('?');
            let mut text = parts.next().unwrap_or_default().to_owned();
            for (part, value) in parts.zip(values) {
                text.push_str(&value.literal());
                text.push_str(part);
            }
            sqlx::raw_sql(AssertSqlSafe(text)).fetch_all(session).await
        }
        Protocol::Prepared => {
            let mut query = sqlx::query(AssertSqlSafe(sql.to_owned()));
            for value in values {
                query = match value {
                    Value::Null => query.bind(None::<String>),
                    Value::Int(value) => query.bind(*value),
                    Value::Double(value) => query.bind(*value),
                    Value::Text(value) => query.bind(value.clone()),
                    Value::Bytes(value) => query.bind(value.clone()),
                };
            }
            query.fetch_all(session).await
        }
    }
}

fn one(rows: &[MySqlRow]) -> Outcome<&MySqlRow> {
    match rows {
        [row] => Ok(row),
        _ => Err(Failure::Wrong(format!("{} rows instead of one", rows.len()))),
    }
}

async fn value(session: &mut MySqlConnection, sql: &str) -> Outcome<i64> {
    let row = session.fetch_one(sqlx::raw_sql(AssertSqlSafe(sql.to_owned()))).await?;
    Ok(row.get_unchecked(0))
}

async fn expect_number(session: &mut MySqlConnection, sql: &str, wanted: i64) -> Outcome<()> {
    expect(&value(session, sql).await?, &wanted)
}

fn expect<T: std::fmt::Debug + PartialEq + ?Sized>(got: &T, wanted: &T) -> Outcome<()> {
    if got == wanted {
        return Ok(());
    }
    Err(Failure::Wrong(format!("{got:.120?}, not {wanted:.120?}")))
}

fn want_error<T>(code: u16, result: sqlx::Result<T>) -> Outcome {
    match result {
        Ok(_) => Err(Failure::Wrong(format!("no error {code}"))),
        Err(sqlx::Error::Database(answer))
            if answer.downcast_ref::<sqlx::mysql::MySqlDatabaseError>().number() == code =>
        {
            Ok(format!("error {code}"))
        }
        Err(error) => Err(error.into()),
    }
}

/// Wait until no other session has the lock, and take it. The server releases it when `session` ends.
async fn lock(session: &mut MySqlConnection, name: &str) -> Outcome<()> {
    expect_number(session, &format!("select get_lock('{name}', {})", DEADLINE.as_secs()), 1).await
}

async fn timed(step: impl Future<Output = Outcome>) -> (Outcome, f64) {
    let began = Instant::now();
    let outcome = step.await;
    (outcome, began.elapsed().as_secs_f64())
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), String> {
    let plan = Plan::read().map_err(|failure| failure.to_string())?;
    for step in setting("STEPS").split(' ') {
        let (outcome, seconds) = timed(plan.step(step)).await;
        let (ok, detail) = match outcome {
            Ok(detail) => (Some(true), detail),
            Err(Failure::NotSupported(reason)) => (None, reason.to_owned()),
            Err(failure) => (Some(false), failure.to_string().chars().take(300).collect()),
        };
        println!("{}", serde_json::json!({"step": step, "ok": ok, "detail": detail, "seconds": seconds}));
    }
    Ok(())
}
