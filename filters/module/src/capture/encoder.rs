//! Encodes commands for the files, and leaves out those that may hold secrets.

use std::collections::HashSet;

use mysql_proto::command::Command;
use sql_text::{Digest, Normalizer};
use traffic_files::record::{self, RecordRef};
use traffic_files::result::{self, ResultRef};

use super::command::EndedCommand;
use super::secrets::{Secrecy, states_have_secret};
use crate::statements::{MAX_STATEMENTS, Shared};

/// The beginning of the statement that restores the states of a session.
const SET_STATES: &[u8] = b"SET SESSION_STATES '";

/// Records, in order, encoded for both files.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Batch {
    /// For the traffic file.
    pub(super) traffic: Vec<u8>,
    /// For the results file.
    pub(super) results: Vec<u8>,
    pub(super) records: u64,
}

impl Batch {
    pub(super) fn is_empty(&self) -> bool {
        self.traffic.is_empty() && self.results.is_empty()
    }

    pub(super) fn clear(&mut self) {
        self.traffic.clear();
        self.results.clear();
        self.records = 0;
    }

    /// `time_ns`: now.
    pub(super) fn add_dropped(&mut self, count: u64, time_ns: i64) {
        result::encode_dropped(count, time_ns, &mut self.results);
    }
}

/// What follows from a normalized text.
#[derive(Debug, Clone, Copy)]
struct TextInfo {
    digest: Digest,
    secrecy: Secrecy,
}

pub(super) struct Encoder {
    normalizer: Normalizer,
    /// By normalized text.
    texts: Shared<TextInfo>,
    /// Connections whose restored states may hold a secret. All their commands are left out, since without the states
    /// they would have another meaning.
    excluded: HashSet<u64>,
}

impl Default for Encoder {
    fn default() -> Self {
        // Nothing refers to an entry, so a full cache is emptied.
        Self { normalizer: Normalizer::default(), texts: Shared::new(|_| false), excluded: HashSet::new() }
    }
}

impl Encoder {
    /// Adds a command. False: it is left out, since it may hold a secret, or follows states that may.
    pub(super) fn add(&mut self, command: &EndedCommand, batch: &mut Batch) -> bool {
        if !self.excluded.is_empty() && self.is_excluded(command) {
            return false;
        }
        let mut digest = command.statement.as_ref().map(|statement| statement.digest);
        if matches!(command.command, Command::Query | Command::Prepare) {
            let Some(found) = self.digest_unless_hidden(&command.content) else {
                if command.content.starts_with(SET_STATES) {
                    self.excluded.insert(command.connection);
                }
                return false;
            };
            digest = digest.or(found);
        }
        let record = RecordRef {
            time_ns: command.time,
            connection: command.connection,
            command: command.command,
            is_success: command.error == 0,
            prepared_id: command.prepared_id,
            prepared_text: command.prepared_text.as_deref(),
            payload: &command.content,
        };
        record::encode(record, &mut batch.traffic);
        let names = command.names.as_names();
        let result = ResultRef {
            connection: command.connection,
            time_ns: command.time,
            latency_us: command.latency_us,
            rows: command.size.rows,
            bytes: command.size.bytes,
            error: command.error,
            checksum: command.checksum,
            digest: digest.as_ref(),
            user: names.user.as_bytes(),
            database: names.database,
            node: names.node.as_bytes(),
        };
        result::encode(result, &mut batch.results);
        batch.records += 1;
        true
    }

    fn is_excluded(&mut self, command: &EndedCommand) -> bool {
        match command.command {
            Command::Quit => self.excluded.remove(&command.connection),
            _ => self.excluded.contains(&command.connection),
        }
    }

    /// The digest of the first statement, if there is one. None: a statement of the text may hold a secret, or there are
    /// too many statements to look at.
    fn digest_unless_hidden(&mut self, text: &[u8]) -> Option<Option<Digest>> {
        let mut first = None;
        let mut statements = sql_text::statements(text);
        for text in statements.by_ref().take(MAX_STATEMENTS) {
            let info = self.identify(&text);
            // Names of variables within states, such as block_encryption_mode, are no sign of a secret.
            let is_hidden =
                if text.starts_with(SET_STATES) { self.have_secret(&text) } else { info.secrecy.hides(&text) };
            if is_hidden {
                return None;
            }
            first.get_or_insert(info.digest);
        }
        statements.next().is_none().then_some(first)
    }

    /// Whether the states in this statement may hold a secret.
    fn have_secret(&mut self, statement: &[u8]) -> bool {
        let states = sql_text::session_states(statement);
        states.is_none_or(|json| states_have_secret(&json, |text| self.digest_unless_hidden(text).is_none()))
    }

    fn identify(&mut self, text: &[u8]) -> TextInfo {
        let normalized = self.normalizer.normalize(text);
        self.texts.get(normalized).unwrap_or_else(|| {
            let secrecy = Secrecy::of(&String::from_utf8_lossy(normalized));
            let info = TextInfo { digest: sql_text::digest(normalized), secrecy };
            self.texts.add(normalized, &info);
            info
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use mysql_proto::tracker::CommandOutcome;

    use super::super::command::{CapturedCommand, SessionNames, SharedNames};
    use super::*;

    fn command(command: Command, content: &[u8]) -> EndedCommand {
        let names = SharedNames::new(&SessionNames { user: "app", database: b"shop", node: "n" });
        CapturedCommand::new(command, content, 5, Instant::now()).end(7, CommandOutcome::Silent, names)
    }

    fn results(commands: &[EndedCommand]) -> (String, u64) {
        let (mut encoder, mut batch) = (Encoder::default(), Batch::default());
        let left_out = commands.iter().filter(|command| !encoder.add(command, &mut batch)).count();
        assert_eq!(batch.records as usize, commands.len() - left_out);
        (String::from_utf8(batch.results).expect("JSON"), left_out as u64)
    }

    #[test]
    fn result_has_the_digest_of_the_first_statement() {
        let (lines, left_out) = results(&[command(Command::Query, b"select 1; select 2 from t")]);
        assert_eq!(left_out, 0);
        assert_eq!(
            lines,
            "{\"conn\":7,\"time\":5,\"us\":0,\"rows\":0,\"bytes\":0,\"error\":0,\"checksum\":null,\
             \"digest\":\"e1c71d1661ae46e09b7aaec1c390957f0d6260410df4e4bc71b9c8d681021471\",\"user\":\"app\",\
             \"database\":\"shop\",\"node\":\"n\"}\n"
        );
    }

    #[test]
    fn texts_with_a_secret_anywhere_are_left_out() {
        let many = "select 1;".repeat(MAX_STATEMENTS) + "create user u identified by 'x'";
        let after_states = "SET SESSION_STATES '{}'; create user u identified by 'x'";
        let texts =
            [after_states, "select 1; create user u identified by 'x'", &many, "create user u identified by 'x'"];
        for text in texts {
            for kind in [Command::Query, Command::Prepare] {
                assert_eq!(results(&[command(kind, text.as_bytes())]), (String::new(), 1), "{text}");
            }
        }
        assert_eq!(results(&[command(Command::InitDb, b"create user")]).1, 0);
    }

    #[test]
    fn session_whose_states_have_a_secret_is_left_out() {
        let states = br#"SET SESSION_STATES '{"prepared-stmts": {"1": {"text": "alter user u identified by ''x''"}}}'"#;
        let commands = [
            command(Command::Query, states),
            command(Command::Query, b"select 1"),
            command(Command::Quit, b""),
            command(Command::Query, br#"SET SESSION_STATES '{"sys-vars": {"block_encryption_mode": "aes-128-ecb"}}'"#),
            command(Command::Query, b"select 2"),
        ];
        let (lines, left_out) = results(&commands);
        assert_eq!((lines.lines().count(), left_out), (2, 3));
    }
}
