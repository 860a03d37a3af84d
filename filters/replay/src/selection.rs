//! Which part of a capture is replayed.

use mysql_proto::command::Command;
use traffic_files::directory::Statement;
use traffic_files::record::Record;

use crate::options::SelectionOptions;

/// What the replay does with a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Choice {
    Replay,
    /// Only what it says about its session is kept.
    Remember,
    Ignore,
}

pub(crate) fn choose(statement: &Statement, options: &SelectionOptions) -> Choice {
    let time_ns = statement.record.time_ns;
    let user = statement.result.as_ref().map(|result| &result.user);
    let is_other_user = !options.users.is_empty() && user.is_none_or(|user| !options.users.contains(user));
    if is_other_user || options.to.is_some_and(|to| time_ns >= to) {
        return Choice::Ignore;
    }
    let database = statement.result.as_ref().map(|result| &result.database);
    let is_other_database =
        !options.databases.is_empty() && database.is_none_or(|database| !options.databases.contains(database));
    let is_early = options.from.is_some_and(|from| time_ns < from);
    if is_early || is_other_database && !controls_session(&statement.record) {
        return Choice::Remember;
    }
    Choice::Replay
}

/// TiDB's error for several statements of a client that has not asked for them.
const MULTI_STATEMENTS_DISABLED: u16 = 8130;

/// Whether the server refused a text because it has several statements, as an injected one may have. A replay's
/// connection may send several, so it would run them. Without results, any failure may have been this one.
pub(crate) fn was_refused(statement: &Statement) -> bool {
    let record = &statement.record;
    if record.command != Command::Query || record.is_success {
        return false;
    }
    match &statement.result {
        Some(result) => result.error == MULTI_STATEMENTS_DISABLED,
        None => sql_text::statements(&record.payload).filter(|one| !one.trim_ascii().is_empty()).count() > 1,
    }
}

/// Whether a command is about the session and not about data. Such commands also run in other databases.
fn controls_session(record: &Record) -> bool {
    match record.command {
        Command::Quit
        | Command::InitDb
        | Command::Ping
        | Command::ChangeUser
        | Command::ResetConnection
        | Command::SetOption => true,
        Command::Query => sql_text::only_controls_session(&record.payload),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use traffic_files::directory::Position;
    use traffic_files::result::ResultLine;

    use super::*;
    use crate::test_records::record;

    fn statement(text: &str, user: &str, database: &str) -> Statement {
        let record = Record { time_ns: 100, ..record(Command::Query, text.as_bytes()) };
        let result = ResultLine {
            connection: 1,
            time_ns: 100,
            latency_us: 0,
            rows: 0,
            bytes: 0,
            error: 0,
            checksum: None,
            digest: None,
            user: user.into(),
            database: database.into(),
            node: String::new(),
        };
        let position = Position { file: Path::new("x").into(), offset: 0 };
        Statement { record, result: Some(result), position }
    }

    #[test]
    fn several_statements_that_the_server_refused_are_known() {
        let mut refused = statement("select 1; drop table t", "app", "shop");
        assert!(!was_refused(&refused), "it has succeeded");
        refused.record.is_success = false;
        assert!(!was_refused(&refused), "it has failed for another reason");
        refused.result = refused.result.map(|result| ResultLine { error: MULTI_STATEMENTS_DISABLED, ..result });
        assert!(was_refused(&refused));
        refused.result = None;
        assert!(was_refused(&refused));
        refused.record.payload = b"drop table t;".to_vec();
        assert!(!was_refused(&refused));
    }

    fn options() -> SelectionOptions {
        SelectionOptions { reads_only: false, users: Vec::new(), databases: Vec::new(), from: None, to: None }
    }

    #[test]
    fn users_and_databases_are_chosen_by_the_results() {
        let users = SelectionOptions { users: vec!["app".into()], ..options() };
        let databases = SelectionOptions { databases: vec!["shop".into(), "x".into()], ..options() };
        let in_shop = statement("select 1", "app", "shop");
        let elsewhere = statement("select 1", "root", "mysql");
        for (statement, options, expected) in [
            (&in_shop, options(), Choice::Replay),
            (&in_shop, users.clone(), Choice::Replay),
            (&elsewhere, users.clone(), Choice::Ignore),
            (&in_shop, databases.clone(), Choice::Replay),
            (&elsewhere, databases.clone(), Choice::Remember),
            (&statement("use shop", "root", "mysql"), databases.clone(), Choice::Replay),
            (&Statement { result: None, ..in_shop.clone() }, options(), Choice::Replay),
            (&Statement { result: None, ..in_shop.clone() }, users, Choice::Ignore),
            (&Statement { result: None, ..in_shop.clone() }, databases, Choice::Remember),
        ] {
            assert_eq!(choose(statement, &options), expected);
        }
    }

    #[test]
    fn window_begins_with_its_first_time_and_ends_before_its_last() {
        for (from, to, expected) in [
            (Some(100), Some(101), Choice::Replay),
            (Some(101), None, Choice::Remember),
            (None, Some(100), Choice::Ignore),
        ] {
            let options = SelectionOptions { from, to, ..options() };
            assert_eq!(choose(&statement("select 1", "a", ""), &options), expected);
        }
    }
}
