import java.nio.file.Path;
import java.sql.Connection;
import java.sql.SQLException;
import java.util.HashMap;
import java.util.Map;

/** The differences between the drivers. */
interface Driver {
    String STORE_PASSWORD = "matrix";

    static Driver named(String name) {
        return name.equals("mariadb") ? new MariaDb() : new MySql();
    }

    /** The scheme of the driver's URLs. */
    String scheme();

    /** Options of all connections. If `store` has trusted certificates, TLS is required and the server is verified. */
    Map<String, String> options(Path store);

    default Map<String, String> prepared() {
        return Map.of("useServerPrepStmts", "true");
    }

    Map<String, String> batches();

    default Map<String, String> cursors() {
        throw new UnsupportedOperationException("no server-side cursors");
    }

    /** The fetch size that streams rows one by one. */
    int rowByRow();

    void ping(Connection session) throws SQLException;

    default void reset(Connection session) throws SQLException {
        throw new UnsupportedOperationException("no reset of a connection, except with MariaDB's servers");
    }

    default void changeUser(Connection session, String user, String password) throws SQLException {
        throw new UnsupportedOperationException("no change of user");
    }

    /** Whether the error means that the connection was lost. */
    boolean isLost(SQLException error);

    /** MySQL Connector/J. */
    final class MySql implements Driver {
        @Override
        public String scheme() {
            return "jdbc:mysql";
        }

        @Override
        public Map<String, String> options(Path store) {
            Map<String, String> options = new HashMap<>();
            options.put("allowLoadLocalInfile", "true");
            options.put("useUnicode", "true");
            options.put("characterEncoding", "UTF-8");
            if (store == null) {
                options.put("sslMode", "DISABLED");
                options.put("allowPublicKeyRetrieval", "true");
            } else {
                options.put("sslMode", "VERIFY_IDENTITY");
                options.put("trustCertificateKeyStoreUrl", store.toUri().toString());
                options.put("trustCertificateKeyStoreType", "PKCS12");
                options.put("trustCertificateKeyStorePassword", STORE_PASSWORD);
            }
            return options;
        }

        @Override
        public Map<String, String> batches() {
            return Map.of("rewriteBatchedStatements", "true", "useServerPrepStmts", "true");
        }

        @Override
        public Map<String, String> cursors() {
            return Map.of("useServerPrepStmts", "true", "useCursorFetch", "true");
        }

        @Override
        public int rowByRow() {
            return Integer.MIN_VALUE;
        }

        private static com.mysql.cj.jdbc.JdbcConnection own(Connection session) {
            return (com.mysql.cj.jdbc.JdbcConnection) session;
        }

        @Override
        public void ping(Connection session) throws SQLException {
            own(session).ping();
        }

        @Override
        public void reset(Connection session) throws SQLException {
            own(session).resetServerState();
        }

        @Override
        public void changeUser(Connection session, String user, String password) throws SQLException {
            own(session).changeUser(user, password);
        }

        @Override
        public boolean isLost(SQLException error) {
            return error instanceof com.mysql.cj.jdbc.exceptions.CommunicationsException;
        }
    }

    /** MariaDB Connector/J. */
    final class MariaDb implements Driver {
        @Override
        public String scheme() {
            return "jdbc:mariadb";
        }

        @Override
        public Map<String, String> options(Path store) {
            Map<String, String> options = new HashMap<>();
            options.put("allowLocalInfile", "true");
            options.put("sslMode", store == null ? "disable" : "verify-full");
            if (store != null) {
                options.put("trustStore", store.toUri().toString());
                options.put("trustStoreType", "PKCS12");
                options.put("trustStorePassword", STORE_PASSWORD);
            }
            return options;
        }

        @Override
        public Map<String, String> batches() {
            return Map.of("useServerPrepStmts", "true", "useBulkStmts", "true");
        }

        @Override
        public int rowByRow() {
            return 1;
        }

        @Override
        public void ping(Connection session) throws SQLException {
            Sql.expect(session.isValid(0), true);
        }

        @Override
        public boolean isLost(SQLException error) {
            return error instanceof java.sql.SQLNonTransientConnectionException && error.getErrorCode() < 1000;
        }
    }
}
