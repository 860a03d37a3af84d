import java.io.ByteArrayInputStream;
import java.security.MessageDigest;
import java.security.SecureRandom;
import java.sql.Connection;
import java.sql.PreparedStatement;
import java.sql.ResultSet;
import java.sql.SQLException;
import java.util.HexFormat;
import java.util.List;
import java.util.Map;

/** Steps with large data. */
final class Volume {
    private Volume() {}

    private static String summed(ResultSet found, long rows) throws SQLException {
        long count = 0;
        long sum = 0;
        while (found.next()) {
            count++;
            sum += found.getLong(1);
        }
        Sql.expect(List.of(count, sum), List.of(rows, rows * (rows + 1) / 2));
        return count + " rows";
    }

    static String bigResult(Map<String, String> protocol, long rows) throws SQLException {
        try (Connection session = Sql.open(protocol);
                PreparedStatement statement = session.prepareStatement("select n from numbers where n <= ?")) {
            statement.setFetchSize(Sql.driver.rowByRow());
            statement.setLong(1, rows);
            try (ResultSet found = statement.executeQuery()) {
                return summed(found, rows);
            }
        }
    }

    static String cursor() throws SQLException {
        try (Connection session = Sql.open(Sql.driver.cursors());
                PreparedStatement statement = session.prepareStatement("select n from numbers where n <= ?")) {
            statement.setFetchSize(700);
            statement.setLong(1, 5000);
            try (ResultSet found = statement.executeQuery()) {
                summed(found, 5000);
            }
            Sql.expect(Sql.number(session, "select 1"), 1L);
            return "5000 rows";
        }
    }

    static String bigValue(Map<String, String> protocol) throws Exception {
        byte[] blob = new byte[Plan.BLOB];
        new SecureRandom().nextBytes(blob);
        String digest = digest(blob);
        try (Connection session = Sql.open(protocol)) {
            Sql.query(session, "drop table if exists blobs");
            Sql.query(session, "create table blobs (id int primary key, data longblob)");
            try (PreparedStatement insert = session.prepareStatement("insert into blobs values (?, ?)")) {
                insert.setInt(1, 1);
                insert.setBinaryStream(2, new ByteArrayInputStream(blob)); // COM_STMT_SEND_LONG_DATA when prepared
                insert.execute();
            }
            List<Object> row = Sql.query(session, "select data, sha2(data, 256) from blobs where id = ?", 1).get(0);
            Sql.expect(row.get(1), digest);
            Sql.expect(digest((byte[]) row.get(0)), digest);
            Sql.query(session, "drop table blobs");
            return Plan.BLOB + " bytes";
        }
    }

    private static String digest(byte[] bytes) throws Exception {
        return HexFormat.of().formatHex(MessageDigest.getInstance("SHA-256").digest(bytes));
    }

    static String loadData() throws SQLException {
        try (Connection session = Sql.open(Sql.TEXT)) {
            Sql.query(session, "drop table if exists loaded");
            Sql.query(session, "create table loaded (id int primary key, name varchar(50))");
            Sql.query(session, "load data local infile ? into table loaded", Plan.LOAD_FILE);
            Sql.expect(Sql.number(session, "select count(*) from loaded"), Plan.LOAD_ROWS);
            Sql.expect(Sql.number(session, "select sum(id) from loaded"), Plan.LOAD_ROWS * (Plan.LOAD_ROWS - 1) / 2);
            Sql.query(session, "drop table loaded");
            return Plan.LOAD_ROWS + " rows";
        }
    }
}
