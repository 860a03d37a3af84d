import com.mysql.cj.jdbc.exceptions.CommunicationsException;
import java.sql.Connection;
import java.sql.ResultSet;
import java.sql.SQLException;
import java.sql.Statement;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;

/** Steps in which a connection ends in the middle of something. */
final class Ends {
    private static final long DEADLINE_MILLIS = 20_000; // until the server has noticed something
    private static final int SLEEP_SECONDS = 60; // a query would last that is to be killed

    private Ends() {}

    /** Wait until the server lists a connection so many times, on that condition. */
    private static void until(Connection session, long count, long connection, String condition) throws Exception {
        String sql =
                "select count(*) from information_schema.processlist where id = " + connection + " " + condition;
        long end = System.nanoTime() + TimeUnit.MILLISECONDS.toNanos(DEADLINE_MILLIS);
        while (Sql.number(session, sql) != count) {
            if (System.nanoTime() > end) {
                throw new IllegalStateException("not within " + DEADLINE_MILLIS + " ms: " + sql + " is " + count);
            }
            Thread.sleep(20);
        }
    }

    static String kill() throws Exception {
        Connection victim = Sql.open(Sql.TEXT);
        try (Connection killer = Sql.open(Sql.TEXT)) {
            long id = Sql.number(victim, "select connection_id()");
            CompletableFuture<SQLException> ended = new CompletableFuture<>();
            Thread sleeping =
                    new Thread(
                            () -> {
                                try {
                                    Sql.query(victim, "select sleep(" + SLEEP_SECONDS + ")");
                                    ended.complete(null);
                                } catch (SQLException error) {
                                    ended.complete(error);
                                }
                            });
            sleeping.setDaemon(true);
            sleeping.start();
            until(killer, 1, id, "and info like 'select sleep%'");
            Sql.query(killer, "kill " + id);
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

    static String cut() throws Exception {
        try (Connection other = Sql.open(Sql.TEXT)) {
            Connection session = Sql.open(Sql.TEXT);
            long id = Sql.number(session, "select connection_id()");
            Statement statement = session.createStatement();
            statement.setFetchSize(Integer.MIN_VALUE);
            ResultSet found = statement.executeQuery("select n, repeat('x', 100) from numbers");
            for (int i = 0; i < 1000; i++) {
                Sql.expect(found.next(), true);
            }
            until(other, 1, id, "");
            session.abort(Runnable::run); // closes the socket without a word
            until(other, 0, id, "");
            try (Connection fresh = Sql.open(Sql.TEXT)) {
                Sql.expect(Sql.number(fresh, "select 1"), 1L);
            }
            return "";
        }
    }
}
