import com.zaxxer.hikari.HikariConfig;
import com.zaxxer.hikari.HikariDataSource;
import java.sql.Connection;
import java.sql.PreparedStatement;
import java.sql.ResultSet;
import java.sql.SQLException;
import java.util.ArrayList;
import java.util.List;
import java.util.TreeMap;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicLongArray;

/**
 * Transactions through HikariCP, as in tests/support/clients/pools.py. It runs until the end of the standard input. No
 * transaction is retried.
 */
public final class PoolLoad {
    private static final int WORKERS = Integer.parseInt(System.getenv("POOL_WORKERS"));
    private static final boolean RECOMMENDED = System.getenv("POOL_SETTINGS").equals("recommended");
    private static final long PAUSE_MILLISECONDS = Long.parseLong(System.getenv("POOL_PAUSE_MS"));

    private final HikariDataSource pool = new HikariDataSource(configuration());
    private final CountDownLatch haveWorked = new CountDownLatch(WORKERS);
    private final AtomicLongArray committed = new AtomicLongArray(WORKERS);
    private final TreeMap<String, Integer> errors = new TreeMap<>();
    private final CountDownLatch stopping = new CountDownLatch(1);

    private PoolLoad() {}

    public static void main(String[] arguments) throws Exception {
        new PoolLoad().run();
        System.exit(0); // even if the driver still has threads
    }

    private static HikariConfig configuration() {
        if (RECOMMENDED) {
            // Otherwise, HikariCP does not validate a connection that was in use in the last 500 ms.
            System.setProperty("com.zaxxer.hikari.aliveBypassWindowMs", "0");
        }
        HikariConfig config = new HikariConfig();
        config.setJdbcUrl(
                "jdbc:mysql://" + System.getenv("POOL_ADDRESS") + "/" + System.getenv("POOL_DATABASE")
                        + "?sslMode=DISABLED");
        config.setUsername("root");
        config.setMaximumPoolSize(WORKERS);
        if (RECOMMENDED) {
            // Otherwise, `SET autocommit` follows each commit, and may meet a closed connection.
            config.setAutoCommit(false);
            config.setKeepaliveTime(30_000);
            config.setMaxLifetime(600_000);
            config.setConnectionTimeout(10_000);
        }
        return config;
    }

    private void run() throws Exception {
        List<Thread> threads = new ArrayList<>();
        for (int worker = 0; worker < WORKERS; worker++) {
            int number = worker;
            Thread thread = new Thread(() -> work(number));
            thread.start();
            threads.add(thread);
        }
        haveWorked.await();
        System.out.println("ready");
        System.in.read();
        stopping.countDown();
        for (Thread thread : threads) {
            thread.join();
        }
        pool.close();
        System.out.println(result());
    }

    private void work(int worker) {
        try {
            while (!stopping.await(PAUSE_MILLISECONDS, TimeUnit.MILLISECONDS)) {
                try {
                    runTransaction(worker);
                } catch (SQLException error) {
                    report(error);
                }
            }
        } catch (InterruptedException interrupted) {
            Thread.currentThread().interrupt();
        }
    }

    private void runTransaction(int worker) throws SQLException {
        try (Connection connection = pool.getConnection()) {
            connection.setAutoCommit(false); // sends nothing if this is the pool's setting
            try (PreparedStatement update =
                            connection.prepareStatement("update counters set count = count + 1 where worker = ?");
                    PreparedStatement select =
                            connection.prepareStatement("select count from counters where worker = ?")) {
                update.setInt(1, worker);
                update.executeUpdate();
                select.setInt(1, worker);
                try (ResultSet rows = select.executeQuery()) {
                    rows.next();
                }
                connection.commit();
                if (committed.incrementAndGet(worker) == 1) { // giving the connection back may still fail
                    haveWorked.countDown();
                }
            }
        }
    }

    private void report(SQLException error) {
        StackTraceElement[] stack = error.getStackTrace();
        String where = "";
        for (StackTraceElement element : stack) {
            if (element.getClassName().startsWith("com.zaxxer.hikari.pool.") && where.isEmpty()) {
                where = element.getMethodName();
            }
        }
        String text = where + ": " + error.getMessage().lines().findFirst().orElse("");
        synchronized (errors) {
            errors.merge(text, 1, Integer::sum);
        }
    }

    private String result() {
        StringBuilder text = new StringBuilder("{\"committed\": " + committed + ", \"errors\": {");
        String separator = "";
        for (var error : errors.entrySet()) {
            text.append(separator).append(quoted(error.getKey())).append(": ").append(error.getValue());
            separator = ", ";
        }
        return text.append("}}").toString();
    }

    private static String quoted(String text) {
        return '"' + text.replace("\\", "\\\\").replace("\"", "\\\"").replaceAll("\\p{Cntrl}", " ") + '"';
    }
}
