// Runs the steps of tests/support/clients/python/script.py: `node client.mjs mysql2|mariadb`.
import { createHash, randomBytes } from "node:crypto";
import { readFileSync } from "node:fs";
import { setTimeout as after } from "node:timers/promises";
import { openSession } from "./sessions.mjs";

const DEADLINE = 20; // The server must notice an event within these seconds.
const SLEEP = 60; // Seconds that a query takes unless it is killed.
const open = await openSession(process.argv[2]);

const env = process.env;
const plan = {
  options: {
    host: env.MATRIX_HOST,
    port: Number(env.MATRIX_PORT),
    user: env.MATRIX_USER,
    password: env.MATRIX_PASSWORD,
    database: env.MATRIX_DATABASE,
    multipleStatements: true,
    compress: env.MATRIX_COMPRESS !== "",
    ssl: env.MATRIX_CA ? { ca: readFileSync(env.MATRIX_CA), verifyIdentity: true } : undefined,
  },
  other: { user: env.MATRIX_OTHER_USER, password: env.MATRIX_OTHER_PASSWORD },
  rows: Number(env.MATRIX_ROWS),
  rowsPrepared: Number(env.MATRIX_ROWS_PREPARED),
  blob: Number(env.MATRIX_BLOB),
  long: Number(env.MATRIX_LONG),
  loadFile: env.MATRIX_LOAD_FILE,
  loadRows: Number(env.MATRIX_LOAD_ROWS),
  steps: env.MATRIX_STEPS.split(" "),
};

const openWith = (options) => open({ ...plan.options, ...options });

/**
 * Wait until no other session has the lock, and take it. The server releases it when `session` ends.
 * If `got` is 0, check that another session has the lock.
 */
async function lock(session, name, got = 1) {
  expect(await session.text(`select get_lock('${name}', ${DEADLINE * got})`), [[got]], name);
}

const userOf = async (session) => (await session.text("select current_user()"))[0][0].split("@")[0];

function expect(got, wanted, what = "got") {
  const [left, right] = [JSON.stringify(got), JSON.stringify(wanted)];
  if (left !== right) throw new Error(`${what}: ${left.slice(0, 120)}, not ${right.slice(0, 120)}`);
}

async function expectError(action, code) {
  try {
    await action();
  } catch (error) {
    expect(error.errno, code, String(error));
    return `error ${code}`;
  }
  throw new Error(`no error ${code}`);
}

/** Run a step with this many sessions. If the step fails, destroy them. */
async function withSessions(count, body) {
  const sessions = [];
  try {
    while (sessions.length < count) sessions.push(await openWith());
    const outcome = await body(...sessions);
    for (const session of sessions) await session.close();
    return outcome;
  } catch (error) {
    for (const session of sessions) session.destroy();
    throw error;
  }
}

async function queries(run, table) {
  const rows = Array.from({ length: 20 }, (_, i) => [
    i,
    `Zeile ${i} 🌊`,
    2 ** 32 + i,
    i / 4,
    i % 2 ? null : "x".repeat(i * 20),
  ]);
  const columns = `select id, name, big, ratio, note from ${table}`;
  await run(`drop table if exists ${table}`);
  await run(
    `create table ${table} (id int primary key, name varchar(200) character set utf8mb4, ` +
      "big bigint, ratio double, note text)",
  );
  for (const row of rows) await run(`insert into ${table} values (?, ?, ?, ?, ?)`, row);
  expect(await run(`${columns} order by id`), rows);
  for (const row of rows.slice(0, 3)) expect(await run(`${columns} where id = ?`, [row[0]]), [row]);
  expect(await run(`${columns} where id = ?`, [-1]), []);
  await run(`update ${table} set name = ? where id >= ?`, ["neu", 10]);
  await run(`delete from ${table} where id = ?`, [19]);
  expect(await run(`select count(*) from ${table} where name = ?`, ["neu"]), [[9]]);
  expect(await run(`select repeat('y', ${plan.long})`), [["y".repeat(plan.long)]]);
  const absent = await expectError(() => run("select * from absent"), 1146);
  const duplicate = await expectError(() => run(`insert into ${table} values (?, 'x', 1, 1, null)`, [1]), 1062);
  await run(`drop table ${table}`);
  return `20 rows, ${absent}, ${duplicate}`;
}

async function bigResult(session, binary, rows) {
  let [count, sum] = [0, 0];
  await session.stream(`select n from numbers where n <= ${rows}`, binary, (row) => {
    count += 1;
    sum += row[0];
  });
  expect([count, sum], [rows, (rows * (rows + 1)) / 2]);
  return `${count} rows`;
}

async function bigValue(run) {
  const blob = randomBytes(plan.blob);
  const digest = createHash("sha256").update(blob).digest("hex");
  await run("drop table if exists blobs");
  await run("create table blobs (id int primary key, data longblob)");
  await run("insert into blobs values (?, ?)", [1, blob]);
  const [[data, there]] = await run("select data, sha2(data, 256) from blobs where id = ?", [1]);
  expect(there, digest, "what the server has");
  expect(createHash("sha256").update(data).digest("hex"), digest, "what came back");
  await run("drop table blobs");
  return `${data.length} bytes`;
}

const isRows = (result) => Array.isArray(result);

const steps = {
  login: () =>
    withSessions(1, async (session) => {
      const [[database]] = await session.text("select database()");
      return `${await userOf(session)} in ${database}`;
    }),

  wrong_password: () => expectError(() => openWith({ password: "not the password" }), 1045),

  ping: () =>
    withSessions(1, async (session) => {
      await session.ping();
      expect(await session.text("select 1"), [[1]]);
      await session.ping();
      return "";
    }),

  query_text: () => withSessions(1, (session) => queries(session.text.bind(session), "query_text")),

  query_prepared: () =>
    withSessions(1, (session) => queries(session.prepared.bind(session), "query_prepared")),

  transactions: () =>
    withSessions(2, async (session, second) => {
      await session.text("drop table if exists tx");
      await session.text("create table tx (id int primary key) engine=innodb");
      for (const [number, end] of ["commit", "rollback"].entries()) {
        await session.begin();
        await session.text("insert into tx values (?)", [number]);
        expect(await session.text("select count(*) from tx"), [[number + 1]]);
        expect(await second.text("select count(*) from tx"), [[number]]);
        await session[end]();
        expect(await second.text("select count(*) from tx"), [[1]]);
      }
      await session.text("drop table tx");
      return "0 1 1";
    }),

  rows_text: () => withSessions(1, (session) => bigResult(session, false, plan.rows)),

  rows_prepared: () => withSessions(1, (session) => bigResult(session, true, plan.rowsPrepared)),

  blob_text: () => withSessions(1, (session) => bigValue(session.text.bind(session))),

  blob_prepared: () => withSessions(1, (session) => bigValue(session.prepared.bind(session))),

  multi: () =>
    withSessions(1, async (session) => {
      const results = await session.text(
        "select 1; drop table if exists multi; create table multi (id int); " +
          "insert into multi values (1), (2); select count(*) from multi; drop table multi",
      );
      expect(results.filter(isRows), [[[1]], [[2]]]);
      const outcome = await expectError(() => session.text("select 1; select * from absent; select 2"), 1146);
      expect(await session.text("select 3"), [[3]]);
      return `2 results, ${outcome}`;
    }),

  batch: () =>
    withSessions(1, async (session) => {
      await session.text("drop table if exists batch");
      await session.text("create table batch (id int primary key, name varchar(50))");
      const rows = Array.from({ length: 100 }, (_, i) => [i, `name ${i}`]);
      await session.batch("insert into batch values (?, ?)", rows);
      expect(await session.text("select count(*), cast(sum(id) as signed) from batch"), [[100, 4950]]);
      await session.text("drop table batch");
      return "100 rows";
    }),

  cursor: () => {
    throw Object.assign(new Error("no server-side cursors"), { notSupported: true });
  },

  load_data: () =>
    withSessions(1, async (session) => {
      const count = plan.loadRows;
      await session.text("drop table if exists loaded");
      await session.text("create table loaded (id int primary key, name varchar(50))");
      await session.load("load data local infile ? into table loaded", plan.loadFile);
      const found = await session.text("select count(*), cast(sum(id) as signed) from loaded");
      expect(found, [[count, (count * (count - 1)) / 2]]);
      await session.text("drop table loaded");
      return `${count} rows`;
    }),

  change_user: () =>
    withSessions(2, async (session, refused) => {
      const who = async () => [await userOf(session), await session.text("select @mark")];
      const { user, password, database } = plan.options;
      await session.text("set @mark = 1");
      await session.changeUser({ ...plan.other, database });
      expect(await who(), [plan.other.user, [[null]]]);
      await session.changeUser({ user, password, database });
      expect(await who(), [user, [[null]]]);
      const wrong = { user: plan.other.user, password: "not the password", database };
      const outcome = await expectError(() => refused.changeUser(wrong), 1045);
      refused.destroy();
      refused.close = () => {};
      return `there and back, ${outcome}`;
    }),

  reset: () =>
    withSessions(1, async (session) => {
      await session.text("set @mark = 1");
      await session.reset();
      expect(await session.text("select @mark"), [[null]]);
      return "";
    }),

  kill: () =>
    withSessions(1, async (killer) => {
      const victim = await openWith();
      try {
        const [[number]] = await victim.text("select connection_id()");
        const [begun, gone] = [`begun ${number}`, `gone ${number}`];
        await lock(victim, begun);
        await lock(victim, gone);
        const ended = victim.text(`select release_lock('${begun}'), sleep(${SLEEP})`).then(
          () => new Error("the query ended without an error"),
          (error) => error,
        );
        await lock(killer, begun);
        await killer.text(`kill ${number}`);
        const error = await Promise.race([ended, after(DEADLINE * 1000, new Error("the query goes on"), { ref: false })]);
        const lost = victim.isLost(error);
        if (!lost && !error.errno) throw error;
        await lock(killer, gone);
        return lost ? "connection lost" : `error ${error.errno}`;
      } finally {
        victim.destroy();
      }
    }),

  cut: () =>
    withSessions(1, async (other) => {
      const session = await openWith();
      const [[number]] = await session.text("select connection_id()");
      const gone = `gone ${number}`;
      await lock(session, gone);
      await new Promise((resolve, reject) => {
        let count = 0;
        session
          .stream("select n, repeat('x', 100) from numbers", false, () => {
            count += 1;
            if (count === 1000) {
              session.pause();
              resolve();
            }
          })
          .catch(reject);
      });
      await lock(other, gone, 0);
      session.cut();
      await lock(other, gone);
      return withSessions(1, async (fresh) => {
        expect(await fresh.text("select 1"), [[1]]);
        return "";
      });
    }),
};

for (const step of plan.steps) {
  const began = performance.now();
  let [ok, detail] = [true, ""];
  try {
    detail = await steps[step]();
  } catch (error) {
    ok = error.notSupported ? null : false;
    detail = (ok === null ? error.message : String(error)).slice(0, 300);
  }
  const seconds = Math.round(performance.now() - began) / 1000;
  console.log(JSON.stringify({ step, ok, detail, seconds }));
}
