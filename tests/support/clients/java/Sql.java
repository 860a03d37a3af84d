import java.io.FileInputStream;
import java.nio.file.Files;
import java.nio.file.Path;
import java.security.KeyStore;
import java.security.cert.Certificate;
import java.security.cert.CertificateFactory;
import java.sql.Connection;
import java.sql.DriverManager;
import java.sql.PreparedStatement;
import java.sql.ResultSet;
import java.sql.SQLException;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.Properties;

/** Connections and their operations. */
final class Sql {
    static final Map<String, String> TEXT = Map.of();
    static Driver driver;

    private static Properties base = new Properties();

    interface Action {
        Object run() throws Exception;
    }

    private Sql() {}

    /** Call this before the first connection. */
    static void begin(Driver chosen) throws Exception {
        driver = chosen;
        base = properties();
    }

    private static Properties properties() throws Exception {
        Properties properties = new Properties();
        properties.setProperty("user", Plan.USER);
        properties.setProperty("password", Plan.PASSWORD);
        properties.setProperty("allowMultiQueries", "true");
        if (!Plan.setting("COMPRESS").isEmpty()) {
            properties.setProperty("useCompression", "true");
        }
        String ca = Plan.setting("CA");
        properties.putAll(driver.options(ca.isEmpty() ? null : trustStore(ca)));
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
            store.store(output, Driver.STORE_PASSWORD.toCharArray());
        }
        return file;
    }

    static Connection open(Map<String, String> options) throws SQLException {
        Properties properties = new Properties();
        properties.putAll(base);
        properties.putAll(options);
        String url = driver.scheme() + "://" + Plan.setting("HOST") + ":" + Plan.setting("PORT") + "/" + Plan.DATABASE;
        return DriverManager.getConnection(url, properties);
    }

    /** Run a statement with parameters; return all rows, each value as the driver returns it. */
    static List<List<Object>> query(Connection connection, String sql, Object... parameters)
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

    static long number(Connection connection, String sql, Object... parameters) throws SQLException {
        return ((Number) query(connection, sql, parameters).get(0).get(0)).longValue();
    }

    static void expect(Object got, Object wanted) {
        if (!got.equals(wanted)) {
            throw new IllegalStateException(shortened(got) + ", not " + shortened(wanted));
        }
    }

    private static String shortened(Object value) {
        String text = value.toString();
        return text.substring(0, Math.min(120, text.length()));
    }

    static String wantError(int code, Action action) throws Exception {
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

    static String user(Connection session) throws SQLException {
        String account = (String) query(session, "select current_user()").get(0).get(0);
        return account.substring(0, account.indexOf('@'));
    }
}
