import com.mysql.cj.jdbc.JdbcConnection;
import com.mysql.cj.jdbc.exceptions.CommunicationsException;
import java.io.ByteArrayInputStream;
import java.io.FileInputStream;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.security.KeyStore;
import java.security.MessageDigest;
import java.security.SecureRandom;
import java.security.cert.Certificate;
import java.security.cert.CertificateFactory;
import java.sql.Connection;
import java.sql.DriverManager;
import java.sql.PreparedStatement;
import java.sql.ResultSet;
import java.sql.SQLException;
import java.sql.Statement;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HexFormat;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.Properties;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;

/** The script of tests/clients/python/script.py with Connector/J. */
public final class Client {
    private static final long DEADLINE_MILLIS = 20_000; // until the server has noticed something
    private static final int SLEEP_SECONDS = 60; // a query would last that is to be killed

    private static final String DATABASE = setting("DATABASE");
    private static final String USER = setting("USER");
    private static final String PASSWORD = setting("PASSWORD");
    private static final String OTHER_USER = setting("OTHER_USER");
    private static final String OTHER_PASSWORD = setting("OTHER_PASSWORD");
    private static final String LOAD_FILE = setting("LOAD_FILE");
    private static final long ROWS = Long.parseLong(setting("ROWS"));
    private static final long ROWS_PREPARED = Long.parseLong(setting("ROWS_PREPARED"));
    private static final long LOAD_ROWS = Long.parseLong(setting("LOAD_ROWS"));
    private static final int BLOB = Integer.parseInt(setting("BLOB"));
    private static final int LONG = Integer.parseInt(setting("LONG"));

    private static final Map<String, String> TEXT = Map.of();
    private static final Map<String, String> PREPARED = Map.of("useServerPrepStmts", "true");

    private static Properties base = new Properties();

    private interface Action {
        Object run() throws Exception;
    }

    private Client() {}

    private static String setting(String name) {
        return System.getenv("MATRIX_" + name);
    }

    public static void main(String[] arguments) throws Exception {
        base = properties();
        for (String step : setting("STEPS").split(" ")) {
            long began = System.nanoTime();
            String ok = "true";
            String detail;
            try {
                detail = run(step);
            } catch (UnsupportedOperationException reason) {
                ok = "null";
                detail = reason.getMessage();
            } catch (Exception error) {
                ok = "false";
                detail = error.toString();
            }
            System.out.printf(
                    Locale.ROOT,
                    "{\"step\": %s, \"ok\": %s, \"detail\": %s, \"seconds\": %.3f}%n",
                    quoted(step),
                    ok,
                    quoted(detail.substring(0, Math.min(300, detail.length()))),
                    (System.nanoTime() - began) / 1e9);
            System.out.flush();
        }
        System.exit(0); // whatever threads the driver has
    }

    private static String run(String step) throws Exception {
        return switch (step) {
            case "login" -> login();
            case "wrong_password" ->
                wantError(1045, () -> open(Map.of("password", "not the password")));
            case "ping" -> ping();
            case "query_text" -> queries(TEXT, step);
            case "query_prepared" -> queries(PREPARED, step);
            case "transactions" -> transactions();
            case "rows_text" -> bigResult(TEXT, ROWS);
            case "rows_prepared" -> bigResult(PREPARED, ROWS_PREPARED);
            case "blob_text" -> bigValue(TEXT);
            case "blob_prepared" -> bigValue(PREPARED);
            case "multi" -> multi();
            case "batch" -> batch();
            case "cursor" -> cursor();
            case "load_data" -> loadData();
            case "change_user" -> changeUser();
            case "reset" -> reset();
            case "kill" -> kill();
            case "cut" -> cut();
            default -> throw new IllegalArgumentException("there is no step " + step);
        };
    }

    private static Properties properties() throws Exception {
        Properties properties = new Properties();
        properties.setProperty("user", USER);
        properties.setProperty("password", PASSWORD);
        properties.setProperty("allowMultiQueries", "true");
        properties.setProperty("allowLoadLocalInfile", "true");
        properties.setProperty("useUnicode", "true");
        properties.setProperty("characterEncoding", "UTF-8");
        String ca = setting("CA");
        if (ca.isEmpty()) {
            properties.setProperty("sslMode", "DISABLED");
            properties.setProperty("allowPublicKeyRetrieval", "true");
        } else {
            properties.setProperty("sslMode", "VERIFY_IDENTITY");
            properties.setProperty("trustCertificateKeyStoreUrl", trustStore(ca).toUri().toString());
            properties.setProperty("trustCertificateKeyStoreType", "PKCS12");
            properties.setProperty("trustCertificateKeyStorePassword", "matrix");
        }
        return properties;
    }

    private static Path trustStore(String ca) throws Exception {
        Certificate certificate;
        try (FileInputStream pem = new FileInputStream(ca)) {
            certificate = CertificateFactory.getInstance("X.509").generateCertificate(pem);
        }
        KeyStore store = KeyStore.getInstance("PKCS12");
        store.load(null, null);
        store.setCertificateEntry("ca", certificate);
        Path file = Files.createTempFile("matrix", ".p12");
        file.toFile().deleteOnExit();
        try (var output = Files.newOutputStream(file)) {
            store.store(output, "matrix".toCharArray());
        }
        return file;
    }

    private static Connection open(Map<String, String> options) throws SQLException {
        Properties properties = new Properties();
        properties.putAll(base);
        properties.putAll(options);
        String url = "jdbc:mysql://" + setting("HOST") + ":" + setting("PORT") + "/" + DATABASE;
        return DriverManager.getConnection(url, properties);
    }

    /** Run a statement with parameters; all rows, each value as the driver gives it. */
    private static List<List<Object>> query(Connection connection, String sql, Object... parameters)
            throws SQLException {
        List<List<Object>> rows = new ArrayList<>();
        try (PreparedStatement statement = connection.prepareStatement(sql)) {
            for (int i = 0; i < parameters.length; i++) {
                statement.setObject(i + 1, parameters[i]);
            }
            if (statement.execute()) {
                try (ResultSet found = statement.getResultSet()) {
                    int columns = found.getMetaData().getColumnCount();
                    while (found.next()) {
                        Object[] row = new Object[columns];
                        for (int i = 0; i < columns; i++) {
                            Object value = found.getObject(i + 1);
                            row[i] = value instanceof Integer number ? Long.valueOf(number) : value;
                        }
                        rows.add(Arrays.asList(row));
                    }
                }
            }
        }
        return rows;
    }

    private static long number(Connection connection, String sql, Object... parameters) throws SQLException {
        return ((Number) query(connection, sql, parameters).get(0).get(0)).longValue();
    }

    private static void expect(Object got, Object wanted) {
        if (!got.equals(wanted)) {
            throw new IllegalStateException(shortened(got) + ", not " + shortened(wanted));
        }
    }

    private static String shortened(Object value) {
        String text = value.toString();
        return text.substring(0, Math.min(120, text.length()));
    }

    private static String wantError(int code, Action action) throws Exception {
        try {
            action.run();
        } catch (SQLException error) {
            if (error.getErrorCode() == code) {
                return "error " + code;
            }
            throw error;
        }
        throw new IllegalStateException("no error " + code);
    }

    private static String login() throws SQLException {
        try (Connection session = open(TEXT)) {
            return user(session) + " in " + query(session, "select database()").get(0).get(0);
        }
    }

    private static String user(Connection session) throws SQLException {
        String account = (String) query(session, "select current_user()").get(0).get(0);
        return account.substring(0, account.indexOf('@'));
    }

    private static String ping() throws SQLException {
        try (Connection session = open(TEXT)) {
            ((JdbcConnection) session).ping();
            expect(number(session, "select 1"), 1L);
            ((JdbcConnection) session).ping();
            return "";
        }
    }

    private static String queries(Map<String, String> protocol, String table) throws Exception {
        List<List<Object>> rows = new ArrayList<>();
        for (long i = 0; i < 20; i++) {
            String note = i % 2 == 1 ? null : "x".repeat((int) i * 20);
            rows.add(Arrays.asList(i, "Zeile " + i + " 🌊", (1L << 32) + i, i / 4.0, note));
        }
        String columns = "select id, name, big, ratio, note from " + table;
        try (Connection session = open(protocol)) {
            query(session, "drop table if exists " + table);
            query(
                    session,
                    "create table " + table + " (id int primary key, name varchar(200) character set utf8mb4, "
                            + "big bigint, ratio double, note text)");
            for (List<Object> row : rows) {
                query(session, "insert into " + table + " values (?, ?, ?, ?, ?)", row.toArray());
            }
            expect(query(session, columns + " order by id"), rows);
            for (List<Object> row : rows.subList(0, 3)) {
                expect(query(session, columns + " where id = ?", row.get(0)), List.of(row));
            }
            expect(query(session, columns + " where id = ?", -1), List.of());
            query(session, "update " + table + " set name = ? where id >= ?", "neu", 10);
            query(session, "delete from " + table + " where id = ?", 19);
            expect(number(session, "select count(*) from " + table + " where name = ?", "neu"), 9L);
            expect(query(session, "select repeat('y', " + LONG + ")"), List.of(List.of("y".repeat(LONG))));
            String absent = wantError(1146, () -> query(session, "select * from absent"));
            String duplicate =
                    wantError(1062, () -> query(session, "insert into " + table + " values (?, 'x', 1, 1, null)", 1));
            query(session, "drop table " + table);
            return "20 rows, " + absent + ", " + duplicate;
        }
    }

    private static String transactions() throws SQLException {
        try (Connection session = open(TEXT);
                Connection second = open(TEXT)) {
            query(session, "drop table if exists tx");
            query(session, "create table tx (id int primary key) engine=innodb");
            session.setAutoCommit(false);
            for (long number = 0; number < 2; number++) {
                query(session, "insert into tx values (?)", number);
                expect(number(session, "select count(*) from tx"), number + 1);
                expect(number(second, "select count(*) from tx"), number);
                if (number == 0) {
                    session.commit();
                } else {
                    session.rollback();
                }
                expect(number(second, "select count(*) from tx"), 1L);
            }
            session.setAutoCommit(true);
            query(session, "drop table tx");
            return "0 1 1";
        }
    }

    private static String summed(ResultSet found, long rows) throws SQLException {
        long count = 0;
        long sum = 0;
        while (found.next()) {
            count++;
            sum += found.getLong(1);
        }
        expect(List.of(count, sum), List.of(rows, rows * (rows + 1) / 2));
        return count + " rows";
    }

    private static String bigResult(Map<String, String> protocol, long rows) throws SQLException {
        try (Connection session = open(protocol);
                PreparedStatement statement = session.prepareStatement("select n from numbers where n <= ?")) {
            statement.setFetchSize(Integer.MIN_VALUE); // Connector/J's word for row by row
            statement.setLong(1, rows);
            try (ResultSet found = statement.executeQuery()) {
                return summed(found, rows);
            }
        }
    }

    private static String cursor() throws SQLException {
        try (Connection session = open(Map.of("useServerPrepStmts", "true", "useCursorFetch", "true"));
                PreparedStatement statement = session.prepareStatement("select n from numbers where n <= ?")) {
            statement.setFetchSize(700);
            statement.setLong(1, 5000);
            try (ResultSet found = statement.executeQuery()) {
                summed(found, 5000);
            }
            expect(number(session, "select 1"), 1L);
            return "5000 rows";
        }
    }

    private static String bigValue(Map<String, String> protocol) throws Exception {
        byte[] blob = new byte[BLOB];
        new SecureRandom().nextBytes(blob);
        String digest = digest(blob);
        try (Connection session = open(protocol)) {
            query(session, "drop table if exists blobs");
            query(session, "create table blobs (id int primary key, data longblob)");
            try (PreparedStatement insert = session.prepareStatement("insert into blobs values (?, ?)")) {
                insert.setInt(1, 1);
                insert.setBinaryStream(2, new ByteArrayInputStream(blob)); // COM_STMT_SEND_LONG_DATA when prepared
                insert.execute();
            }
            List<Object> row = query(session, "select data, sha2(data, 256) from blobs where id = ?", 1).get(0);
            expect(row.get(1), digest);
            expect(digest((byte[]) row.get(0)), digest);
            query(session, "drop table blobs");
            return BLOB + " bytes";
        }
    }

    private static String digest(byte[] bytes) throws Exception {
        return HexFormat.of().formatHex(MessageDigest.getInstance("SHA-256").digest(bytes));
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

    private static String multi() throws Exception {
        try (Connection session = open(TEXT)) {
            List<Long> values =
                    results(
                            session,
                            "select 1; drop table if exists multi; create table multi (id int); "
                                    + "insert into multi values (1), (2); select count(*) from multi; drop table multi");
            expect(values, List.of(1L, 2L));
            String told = wantError(1146, () -> results(session, "select 1; select * from absent; select 2"));
            expect(number(session, "select 3"), 3L);
            return "2 results, " + told;
        }
    }

    private static String batch() throws SQLException {
        try (Connection session = open(Map.of("rewriteBatchedStatements", "true", "useServerPrepStmts", "true"))) {
            query(session, "drop table if exists batch");
            query(session, "create table batch (id int primary key, name varchar(50))");
            try (PreparedStatement insert = session.prepareStatement("insert into batch values (?, ?)")) {
                for (int i = 0; i < 100; i++) {
                    insert.setInt(1, i);
                    insert.setString(2, "name " + i);
                    insert.addBatch();
                }
                insert.executeBatch();
            }
            expect(number(session, "select count(*) from batch"), 100L);
            expect(number(session, "select sum(id) from batch"), 4950L);
            query(session, "drop table batch");
            return "100 rows";
        }
    }

    private static String loadData() throws SQLException {
        try (Connection session = open(TEXT)) {
            query(session, "drop table if exists loaded");
            query(session, "create table loaded (id int primary key, name varchar(50))");
            query(session, "load data local infile ? into table loaded", LOAD_FILE);
            expect(number(session, "select count(*) from loaded"), LOAD_ROWS);
            expect(number(session, "select sum(id) from loaded"), LOAD_ROWS * (LOAD_ROWS - 1) / 2);
            query(session, "drop table loaded");
            return LOAD_ROWS + " rows";
        }
    }

    private static String changeUser() throws Exception {
        List<List<Object>> unset = List.of(Arrays.asList((Object) null));
        try (Connection session = open(TEXT)) {
            JdbcConnection driver = (JdbcConnection) session;
            query(session, "set @mark = 1");
            driver.changeUser(OTHER_USER, OTHER_PASSWORD);
            expect(user(session), OTHER_USER);
            expect(query(session, "select @mark"), unset);
            driver.changeUser(USER, PASSWORD);
            expect(user(session), USER);
            expect(query(session, "select @mark"), unset);
        }
        Connection refused = open(TEXT);
        try {
            return "there and back, "
                    + wantError(
                            1045,
                            () -> {
                                ((JdbcConnection) refused).changeUser(OTHER_USER, "not the password");
                                return null;
                            });
        } finally {
            refused.abort(Runnable::run);
        }
    }

    private static String reset() throws SQLException {
        try (Connection session = open(TEXT)) {
            query(session, "set @mark = 1");
            ((JdbcConnection) session).resetServerState();
            expect(query(session, "select @mark").get(0), Arrays.asList((Object) null));
            return "";
        }
    }

    /** Wait until the server lists a connection so many times, on that condition. */
    private static void until(Connection session, long count, long connection, String condition) throws Exception {
        String sql =
                "select count(*) from information_schema.processlist where id = " + connection + " " + condition;
        long end = System.nanoTime() + TimeUnit.MILLISECONDS.toNanos(DEADLINE_MILLIS);
        while (number(session, sql) != count) {
            if (System.nanoTime() > end) {
                throw new IllegalStateException("not within " + DEADLINE_MILLIS + " ms: " + sql + " is " + count);
            }
            Thread.sleep(20);
        }
    }

    private static String kill() throws Exception {
        Connection victim = open(TEXT);
        try (Connection killer = open(TEXT)) {
            long id = number(victim, "select connection_id()");
            CompletableFuture<SQLException> ended = new CompletableFuture<>();
            Thread sleeping =
                    new Thread(
                            () -> {
                                try {
                                    query(victim, "select sleep(" + SLEEP_SECONDS + ")");
                                    ended.complete(null);
                                } catch (SQLException error) {
                                    ended.complete(error);
                                }
                            });
            sleeping.setDaemon(true);
            sleeping.start();
            until(killer, 1, id, "and info like 'select sleep%'");
            query(killer, "kill " + id);
            SQLException error = ended.get(DEADLINE_MILLIS, TimeUnit.MILLISECONDS);
            if (error == null) {
                throw new IllegalStateException("the query ended without an error");
            }
            until(killer, 0, id, "");
            return error instanceof CommunicationsException ? "connection lost" : "error " + error.getErrorCode();
        } finally {
            victim.abort(Runnable::run);
        }
    }

    private static String cut() throws Exception {
        try (Connection other = open(TEXT)) {
            Connection session = open(TEXT);
            long id = number(session, "select connection_id()");
            Statement statement = session.createStatement();
            statement.setFetchSize(Integer.MIN_VALUE);
            ResultSet found = statement.executeQuery("select n, repeat('x', 100) from numbers");
            for (int i = 0; i < 1000; i++) {
                expect(found.next(), true);
            }
            until(other, 1, id, "");
            session.abort(Runnable::run); // closes the socket without a word
            until(other, 0, id, "");
            try (Connection fresh = open(TEXT)) {
                expect(number(fresh, "select 1"), 1L);
            }
            return "";
        }
    }

    private static String quoted(String text) {
        StringBuilder quoted = new StringBuilder("\"");
        for (char letter : text.toCharArray()) {
            if (letter == '"' || letter == '\\') {
                quoted.append('\\').append(letter);
            } else if (letter < ' ' || letter > '~') {
                quoted.append(String.format("\\u%04x", (int) letter));
            } else {
                quoted.append(letter);
            }
        }
        return quoted.append('"').toString();
    }
}
