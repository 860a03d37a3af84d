import java.nio.file.Path;
import java.sql.Connection;
import java.sql.SQLException;
import java.util.HashMap;
import java.util.Map;

/** What each driver has its own words for. */
interface Driver {
    String STORE_PASSWORD = "matrix";

    static Driver named(String name) {
        return name.equals("mariadb") ? new MariaDb() : new MySql();
    }

    /** Of its URLs. */
    String scheme();

    /** For all connections; with a store of certificates, TLS is demanded and they are checked by it. */
    Map<String, String> options(Path store);

    Map<String, String> prepared();

    Map<String, String> batches();

    Map<String, String> cursors();

    /** The fetch size with which rows are read one by one. */
    int rowByRow();

    void ping(Connection session) throws SQLException;

    void reset(Connection session) throws SQLException;

    void changeUser(Connection session, String user, String password) throws SQLException;

    /** Whether it says that there is no connection any more. */
    boolean isLost(SQLException error);

    /** MySQL's Connector/J. */
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
            if (!Plan.setting("COMPRESS").isEmpty()) {
                options.put("useCompression", "true");
            }
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
        public Map<String, String> prepared() {
            return Map.of("useServerPrepStmts", "true");
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

    /** MariaDB's. */
    final class MariaDb implements Driver {
        @Override
        public String scheme() {
            return "jdbc:mariadb";
        }

        @Override
        public Map<String, String> options(Path store) {
            Map<String, String> options = new HashMap<>();
            options.put("allowLocalInfile", "true");
            if (!Plan.setting("COMPRESS").isEmpty()) {
                options.put("useCompression", "true");
            }
            options.put("sslMode", store == null ? "disable" : "verify-full");
            if (store != null) {
                options.put("trustStore", store.toUri().toString());
                options.put("trustStoreType", "PKCS12");
                options.put("trustStorePassword", STORE_PASSWORD);
            }
            return options;
        }

        @Override
        public Map<String, String> prepared() {
            return Map.of("useServerPrepStmts", "true");
        }

        @Override
        public Map<String, String> batches() {
            return Map.of("useServerPrepStmts", "true", "useBulkStmts", "true");
        }

        @Override
        public Map<String, String> cursors() {
            throw new UnsupportedOperationException("no server-side cursors");
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
        public void reset(Connection session) {
            throw new UnsupportedOperationException("no reset of a connection, but with MariaDB's servers");
        }

        @Override
        public void changeUser(Connection session, String user, String password) {
            throw new UnsupportedOperationException("no change of user");
        }

        @Override
        public boolean isLost(SQLException error) {
            return error instanceof java.sql.SQLNonTransientConnectionException && error.getErrorCode() < 1000;
        }
    }
}
