/** The parameters of a run, from its environment. */
final class Plan {
    static final String DATABASE = setting("DATABASE");
    static final String USER = setting("USER");
    static final String PASSWORD = setting("PASSWORD");
    static final String OTHER_USER = setting("OTHER_USER");
    static final String OTHER_PASSWORD = setting("OTHER_PASSWORD");
    static final String LOAD_FILE = setting("LOAD_FILE");
    static final long ROWS = Long.parseLong(setting("ROWS"));
    static final long ROWS_PREPARED = Long.parseLong(setting("ROWS_PREPARED"));
    static final long LOAD_ROWS = Long.parseLong(setting("LOAD_ROWS"));
    static final int BLOB = Integer.parseInt(setting("BLOB"));
    static final int LONG = Integer.parseInt(setting("LONG"));

    private Plan() {}

    static String setting(String name) {
        return System.getenv("MATRIX_" + name);
    }
}
