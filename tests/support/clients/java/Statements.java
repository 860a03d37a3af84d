import java.sql.Connection;
import java.sql.PreparedStatement;
import java.sql.ResultSet;
import java.sql.SQLException;
import java.sql.Statement;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Map;

/** Steps about logins, statements and transactions. */
final class Statements {
    private Statements() {}

    static String login() throws SQLException {
        try (Connection session = Sql.open(Sql.TEXT)) {
            return Sql.user(session) + " in " + Sql.query(session, "select database()").get(0).get(0);
        }
    }

    static String ping() throws SQLException {
        try (Connection session = Sql.open(Sql.TEXT)) {
            Sql.driver.ping(session);
            Sql.expect(Sql.number(session, "select 1"), 1L);
            Sql.driver.ping(session);
            return "";
        }
    }

    static String queries(Map<String, String> protocol, String table) throws Exception {
        List<List<Object>> rows = new ArrayList<>();
        for (long i = 0; i < 20; i++) {
            String note = i % 2 == 1 ? null : "x".repeat((int) i * 20);
            rows.add(Arrays.asList(i, "Zeile " + i + " 🌊", (1L << 32) + i, i / 4.0, note));
        }
        String columns = "select id, name, big, ratio, note from " + table;
        try (Connection session = Sql.open(protocol)) {
            Sql.query(session, "drop table if exists " + table);
            Sql.query(
                    session,
                    "create table " + table + " (id int primary key, name varchar(200) character set utf8mb4, "
                            + "big bigint, ratio double, note text)");
            for (List<Object> row : rows) {
                Sql.query(session, "insert into " + table + " values (?, ?, ?, ?, ?)", row.toArray());
            }
            Sql.expect(Sql.query(session, columns + " order by id"), rows);
            for (List<Object> row : rows.subList(0, 3)) {
                Sql.expect(Sql.query(session, columns + " where id = ?", row.get(0)), List.of(row));
            }
            Sql.expect(Sql.query(session, columns + " where id = ?", -1), List.of());
            Sql.query(session, "update " + table + " set name = ? where id >= ?", "neu", 10);
            Sql.query(session, "delete from " + table + " where id = ?", 19);
            Sql.expect(Sql.number(session, "select count(*) from " + table + " where name = ?", "neu"), 9L);
            List<List<Object>> longValue = List.of(List.of("y".repeat(Plan.LONG)));
            Sql.expect(Sql.query(session, "select repeat('y', " + Plan.LONG + ")"), longValue);
            String absent = Sql.wantError(1146, () -> Sql.query(session, "select * from absent"));
            String again = "insert into " + table + " values (?, 'x', 1, 1, null)";
            String duplicate = Sql.wantError(1062, () -> Sql.query(session, again, 1));
            Sql.query(session, "drop table " + table);
            return "20 rows, " + absent + ", " + duplicate;
        }
    }

    static String transactions() throws SQLException {
        try (Connection session = Sql.open(Sql.TEXT);
                Connection second = Sql.open(Sql.TEXT)) {
            Sql.query(session, "drop table if exists tx");
            Sql.query(session, "create table tx (id int primary key) engine=innodb");
            session.setAutoCommit(false);
            for (long number = 0; number < 2; number++) {
                Sql.query(session, "insert into tx values (?)", number);
                Sql.expect(Sql.number(session, "select count(*) from tx"), number + 1);
                Sql.expect(Sql.number(second, "select count(*) from tx"), number);
                if (number == 0) {
                    session.commit();
                } else {
                    session.rollback();
                }
                Sql.expect(Sql.number(second, "select count(*) from tx"), 1L);
            }
            session.setAutoCommit(true);
            Sql.query(session, "drop table tx");
            return "0 1 1";
        }
    }

    private static List<Long> results(Connection session, String sql) throws SQLException {
        List<Long> values = new ArrayList<>();
        try (Statement statement = session.createStatement()) {
            boolean rows = statement.execute(sql);
            while (rows || statement.getUpdateCount() != -1) {
                if (rows) {
                    try (ResultSet found = statement.getResultSet()) {
                        while (found.next()) {
                            values.add(found.getLong(1));
                        }
                    }
                }
                rows = statement.getMoreResults();
            }
        }
        return values;
    }

    static String multi() throws Exception {
        try (Connection session = Sql.open(Sql.TEXT)) {
            List<Long> values =
                    results(
                            session,
                            "select 1; drop table if exists multi; create table multi (id int); "
                                    + "insert into multi values (1), (2); select count(*) from multi; drop table multi");
            Sql.expect(values, List.of(1L, 2L));
            String outcome = Sql.wantError(1146, () -> results(session, "select 1; select * from absent; select 2"));
            Sql.expect(Sql.number(session, "select 3"), 3L);
            return "2 results, " + outcome;
        }
    }

    static String batch() throws SQLException {
        try (Connection session = Sql.open(Sql.driver.batches())) {
            Sql.query(session, "drop table if exists batch");
            Sql.query(session, "create table batch (id int primary key, name varchar(50))");
            try (PreparedStatement insert = session.prepareStatement("insert into batch values (?, ?)")) {
                for (int i = 0; i < 100; i++) {
                    insert.setInt(1, i);
                    insert.setString(2, "name " + i);
                    insert.addBatch();
                }
                insert.executeBatch();
            }
            Sql.expect(Sql.number(session, "select count(*) from batch"), 100L);
            Sql.expect(Sql.number(session, "select sum(id) from batch"), 4950L);
            Sql.query(session, "drop table batch");
            return "100 rows";
        }
    }

    static String changeUser() throws Exception {
        List<List<Object>> unset = List.of(Arrays.asList((Object) null));
        try (Connection session = Sql.open(Sql.TEXT)) {
            Sql.query(session, "set @mark = 1");
            Sql.driver.changeUser(session, Plan.OTHER_USER, Plan.OTHER_PASSWORD);
            Sql.expect(Sql.user(session), Plan.OTHER_USER);
            Sql.expect(Sql.query(session, "select @mark"), unset);
            Sql.driver.changeUser(session, Plan.USER, Plan.PASSWORD);
            Sql.expect(Sql.user(session), Plan.USER);
            Sql.expect(Sql.query(session, "select @mark"), unset);
        }
        Connection refused = Sql.open(Sql.TEXT);
        try {
            return "there and back, "
                    + Sql.wantError(
                            1045,
                            () -> {
                                Sql.driver.changeUser(refused, Plan.OTHER_USER, "not the password");
                                return null;
                            });
        } finally {
            refused.abort(Runnable::run);
        }
    }

    static String reset() throws SQLException {
        try (Connection session = Sql.open(Sql.TEXT)) {
            Sql.query(session, "set @mark = 1");
            Sql.driver.reset(session);
            Sql.expect(Sql.query(session, "select @mark").get(0), Arrays.asList((Object) null));
            return "";
        }
    }
}
