// Sessions for client.mjs, with mysql2 or MariaDB's own driver. `text` and `prepared` return rows as arrays.
import { createReadStream } from "node:fs";

class NotSupported extends Error {
  notSupported = true;
}

/** Return a function that opens sessions with this driver. */
export async function openSession(driver) {
  if (driver === "mysql2") {
    const { default: mysql } = await import("mysql2/promise");
    return async (options) => {
      const connection = await mysql.createConnection({ ...options, charset: "utf8mb4", supportBigNumbers: true });
      connection.on("error", () => {}); // Each query reports its own error.
      return new Mysql2Session(connection);
    };
  }
  const mariadb = await import("mariadb");
  return async (options) => {
    const own = { charset: "utf8mb4", bigIntAsNumber: true, permitLocalInfile: true, rowsAsArray: true };
    const connection = await mariadb.createConnection({ ...options, ...own });
    connection.on("error", () => {});
    return new MariadbSession(connection);
  };
}

class Session {
  constructor(connection) {
    this.connection = connection;
  }

  ping() {
    return this.connection.ping();
  }

  begin() {
    return this.connection.beginTransaction();
  }

  commit() {
    return this.connection.commit();
  }

  rollback() {
    return this.connection.rollback();
  }

  reset() {
    return this.connection.reset();
  }

  changeUser(options) {
    return this.connection.changeUser(options);
  }

  close() {
    return this.connection.end();
  }

  destroy() {
    this.connection.destroy();
  }
}

class Mysql2Session extends Session {
  async text(sql, parameters = []) {
    const [rows] = await this.connection.query({ sql, rowsAsArray: true }, parameters);
    return rows;
  }

  async prepared(sql, parameters = []) {
    const [rows] = await this.connection.execute({ sql, rowsAsArray: true }, parameters);
    return rows;
  }

  /** Call `eachRow` with each row. The driver's promise interface would first collect all rows. */
  stream(sql, binary, eachRow) {
    const core = this.connection.connection;
    const query = binary ? core.execute({ sql, rowsAsArray: true }) : core.query({ sql, rowsAsArray: true });
    return new Promise((resolve, reject) => {
      query.on("result", eachRow);
      query.on("error", reject);
      query.on("end", resolve);
    });
  }

  batch() {
    throw new NotSupported("no protocol of its own for batches");
  }

  load(sql, file) {
    const infileStreamFactory = (path) => createReadStream(path);
    return this.connection.query({ sql, values: [file], infileStreamFactory });
  }

  pause() {
    this.connection.connection.stream.pause();
  }

  /** Close the socket without COM_QUIT. The driver's `destroy` would first send all data. */
  cut() {
    this.connection.connection.stream.destroy();
  }

  isLost(error) {
    return error.code === "PROTOCOL_CONNECTION_LOST";
  }
}

class MariadbSession extends Session {
  text(sql, parameters = []) {
    return this.connection.query(sql, parameters);
  }

  prepared(sql, parameters = []) {
    return this.connection.execute(sql, parameters);
  }

  async stream(sql, binary, eachRow) {
    if (binary) {
      // The driver streams only results of the text protocol.
      for (const row of await this.prepared(sql)) eachRow(row);
      return;
    }
    this.rows = this.connection.queryStream(sql);
    for await (const row of this.rows) eachRow(row);
  }

  batch(sql, rows) {
    return this.connection.batch(sql, rows);
  }

  load(sql, file) {
    return this.connection.query(sql, [file]);
  }

  changeUser() {
    throw new NotSupported("no change of user, except with MariaDB's servers");
  }

  pause() {
    this.rows.pause();
  }

  cut() {
    this.connection.destroy();
  }

  isLost(error) {
    return error.fatal && !(error.errno > 0 && error.errno < 2000);
  }
}
