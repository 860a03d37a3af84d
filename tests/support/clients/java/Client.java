import java.util.Locale;
import java.util.Map;

/** Runs the steps of tests/support/clients/python/script.py with MySQL's or MariaDB's Connector/J. */
public final class Client {
    private Client() {}

    public static void main(String[] arguments) throws Exception {
        Sql.begin(Driver.named(arguments[0]));
        for (String step : Plan.setting("STEPS").split(" ")) {
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
        System.exit(0); // even if the driver still has threads
    }

    static String run(String step) throws Exception {
        return switch (step) {
            case "login" -> Statements.login();
            case "wrong_password" ->
                Sql.wantError(1045, () -> Sql.open(Map.of("password", "not the password")));
            case "ping" -> Statements.ping();
            case "query_text" -> Statements.queries(Sql.TEXT, step);
            case "query_prepared" -> Statements.queries(Sql.driver.prepared(), step);
            case "transactions" -> Statements.transactions();
            case "rows_text" -> Volume.bigResult(Sql.TEXT, Plan.ROWS);
            case "rows_prepared" -> Volume.bigResult(Sql.driver.prepared(), Plan.ROWS_PREPARED);
            case "blob_text" -> Volume.bigValue(Sql.TEXT);
            case "blob_prepared" -> Volume.bigValue(Sql.driver.prepared());
            case "multi" -> Statements.multi();
            case "batch" -> Statements.batch();
            case "cursor" -> Volume.cursor();
            case "load_data" -> Volume.loadData();
            case "change_user" -> Statements.changeUser();
            case "reset" -> Statements.reset();
            case "kill" -> Ends.kill();
            case "cut" -> Ends.cut();
            default -> throw new IllegalArgumentException("there is no step " + step);
        };
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
