import java.sql.Connection;
import java.sql.ResultSet;
import java.sql.SQLException;
import java.sql.Statement;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;

/** Steps in which a connection ends in the middle of an operation. */
final class Ends {
    private static final int DEADLINE_SECONDS = 20; // the server must notice an event within this time
    private static final int SLEEP_SECONDS = 60; // duration of a query unless it is killed

    private Ends() {}

    /** Wait until no other session has the lock, and take it. The server releases it when `session` ends. */
    private static void lock(Connection session, String name) throws Exception {
        Sql.expect(Sql.number(session, "select get_lock('" + name + "', " + DEADLINE_SECONDS + ")"), 1L);
    }

    static String kill() throws Exception {
        Connection victim = Sql.open(Sql.TEXT);
        try (Connection killer = Sql.open(Sql.TEXT)) {
            long id = Sql.number(victim, "select connection_id()");
            String begun = "begun " + id;
            String gone = "gone " + id;
            lock(victim, begun);
            lock(victim, gone);
            String sleep = "select release_lock('" + begun + "'), sleep(" + SLEEP_SECONDS + ")";
            CompletableFuture<SQLException> ended = new CompletableFuture<>();
            Thread sleeping =
                    new Thread(
                            () -> {
                                try {
                                    Sql.query(victim, sleep);
                                    ended.complete(null);
                                } catch (SQLException error) {
                                    ended.complete(error);
                                }
                            });
            sleeping.setDaemon(true);
            sleeping.start();
            lock(killer, begun);
            Sql.query(killer, "kill " + id);
            SQLException error = ended.get(DEADLINE_SECONDS, TimeUnit.SECONDS);
            if (error == null) {
                throw new IllegalStateException("the query ended without an error");
            }
            lock(killer, gone);
            return Sql.driver.isLost(error) ? "connection lost" : "error " + error.getErrorCode();
        } finally {
            victim.abort(Runnable::run);
        }
    }

    static String cut() throws Exception {
        try (Connection other = Sql.open(Sql.TEXT)) {
            Connection session = Sql.open(Sql.TEXT);
            String gone = "gone " + Sql.number(session, "select connection_id()");
            lock(session, gone);
            Statement statement = session.createStatement();
            statement.setFetchSize(Sql.driver.rowByRow());
            ResultSet found = statement.executeQuery("select n, repeat('x', 100) from numbers");
            for (int i = 0; i < 1000; i++) {
                Sql.expect(found.next(), true);
            }
            Sql.expect(Sql.number(other, "select get_lock('" + gone + "', 0)"), 0L);
            session.abort(Runnable::run); // closes the socket without COM_QUIT
            lock(other, gone);
            try (Connection fresh = Sql.open(Sql.TEXT)) {
                Sql.expect(Sql.number(fresh, "select 1"), 1L);
            }
            return "";
        }
    }
}
