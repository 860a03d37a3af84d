//! What a replay must remember of a session, and what follows for its next command. No I/O.

use std::borrow::Cow;
use std::collections::HashMap;

use data_encoding::BASE64;
use mysql_proto::command::Command;
use mysql_proto::query::LAST_PREPARED;
use serde::Deserialize;
use sql_text::Normalizer;
use traffic_files::record::Record;

use crate::prepared::{Prepared, with_id};
use crate::reads::{PreparedReads, StatementKind, statement_kinds};
use crate::skip::SkipReason;

/// What to do with a command.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Plan<'a> {
    /// `payload`: without the byte of the command.
    Send {
        command: Command,
        payload: Cow<'a, [u8]>,
    },
    /// First prepare this text, and report it with [`SessionState::on_prepared`]. Then ask for a plan again.
    Prepare {
        captured_id: u32,
        text: Vec<u8>,
    },
    Skip(SkipReason),
    /// The session ends.
    Quit,
}

/// The state of a session, as far as the capture tells.
#[derive(Default)]
pub(crate) struct SessionState {
    /// The database in which a new connection continues. Empty: none.
    pub(crate) database: Vec<u8>,
    /// By their ids in the capture.
    prepared: HashMap<u32, Prepared>,
    prepared_reads: PreparedReads,
    /// `SET SESSION_STATES` has restored statements on this connection, with the ids of the capture.
    has_restored_states: bool,
    normalizer: Normalizer,
}

impl SessionState {
    /// Decides about the next command. Also keeps what it prepares, so it is called once for each record, and again only
    /// after [`Plan::Prepare`].
    pub(crate) fn plan<'a>(&mut self, record: &'a Record, reads_only: bool) -> Plan<'a> {
        let send = || Plan::Send { command: record.command, payload: Cow::Borrowed(&record.payload) };
        match record.command {
            Command::Quit => Plan::Quit,
            Command::Query => {
                let kinds = statement_kinds(text_of(record), &mut self.normalizer);
                if kinds.contains(&StatementKind::NeverReplayed) {
                    Plan::Skip(SkipReason::NeverReplayed)
                } else if reads_only && !self.prepared_reads.admit(&kinds) {
                    Plan::Skip(SkipReason::MayWrite)
                } else {
                    send()
                }
            }
            Command::Prepare => {
                let prepared = Prepared::new(text_of(record), &mut self.normalizer);
                let is_skipped = reads_only && !prepared.is_read;
                if let Some(id) = record.prepared_id {
                    self.prepared.insert(id, prepared);
                }
                if is_skipped { Plan::Skip(SkipReason::MayWrite) } else { send() }
            }
            Command::Execute
            | Command::BulkExecute
            | Command::SendLongData
            | Command::Fetch
            | Command::ResetStatement
            | Command::CloseStatement => self.plan_prepared(record, reads_only),
            Command::ChangeUser | Command::ResetConnection => {
                Plan::Send { command: Command::ResetConnection, payload: Cow::Borrowed(&[]) }
            }
            Command::InitDb
            | Command::FieldList
            | Command::Statistics
            | Command::ProcessInfo
            | Command::Ping
            | Command::SetOption => send(),
            Command::Refresh | Command::Debug if reads_only => Plan::Skip(SkipReason::MayWrite),
            Command::Refresh | Command::Debug => send(),
            Command::Shutdown
            | Command::ProcessKill
            | Command::BinlogDump
            | Command::TableDump
            | Command::RegisterSlave
            | Command::BinlogDumpGtid
            | Command::Other => Plan::Skip(SkipReason::NeverReplayed),
        }
    }

    /// Decides about a command that names a prepared statement.
    fn plan_prepared<'a>(&mut self, record: &'a Record, reads_only: bool) -> Plan<'a> {
        let Some(captured_id) = captured_id(record) else { return Plan::Skip(SkipReason::UnknownStatement) };
        if let (None, Some(text)) = (self.prepared.get(&captured_id), &record.prepared_text) {
            self.prepared.insert(captured_id, Prepared::new(text, &mut self.normalizer));
        }
        let is_unsent = self.prepared.get(&captured_id).is_some_and(|prepared| prepared.id().is_none());
        if record.command == Command::CloseStatement && is_unsent {
            // Nothing reports that it is closed, and a session may prepare and close for each of its writes.
            let is_read = self.prepared.remove(&captured_id).is_some_and(|prepared| prepared.is_read);
            let is_write = reads_only && !is_read;
            return Plan::Skip(if is_write { SkipReason::MayWrite } else { SkipReason::UnknownStatement });
        }
        let send = |payload| Plan::Send { command: record.command, payload };
        let Some(prepared) = self.prepared.get_mut(&captured_id) else {
            let is_known_to_target = self.has_restored_states || captured_id == LAST_PREPARED;
            return if is_known_to_target && !reads_only {
                send(Cow::Borrowed(&record.payload))
            } else {
                Plan::Skip(SkipReason::UnknownStatement)
            };
        };
        if reads_only && !prepared.is_read {
            return Plan::Skip(SkipReason::MayWrite);
        }
        match (prepared.id(), record.command) {
            (Some(id), Command::Execute) => send(Cow::Owned(prepared.execution(id, &record.payload))),
            (Some(id), _) => send(Cow::Owned(with_id(id, &record.payload))),
            (None, Command::Execute | Command::BulkExecute | Command::SendLongData) => {
                Plan::Prepare { captured_id, text: prepared.text.clone() }
            }
            // There is nothing to fetch, reset or close.
            (None, _) => Plan::Skip(SkipReason::UnknownStatement),
        }
    }

    /// The target has prepared a statement under this id.
    pub(crate) fn on_prepared(&mut self, captured_id: u32, id: u32) {
        if let Some(prepared) = self.prepared.get_mut(&captured_id) {
            prepared.set_id(Some(id));
        }
    }

    /// Applies a command that has succeeded. `prepared_id`: the id that the target gave. `is_replayed`: it ran on the
    /// target; otherwise it was only successful in the capture.
    pub(crate) fn learn(&mut self, record: &Record, prepared_id: Option<u32>, is_replayed: bool) {
        match record.command {
            Command::InitDb => self.database.clone_from(&record.payload),
            Command::Prepare => {
                let Some(captured_id) = record.prepared_id else { return };
                if !is_replayed {
                    self.prepared.insert(captured_id, Prepared::new(text_of(record), &mut self.normalizer));
                }
                if let Some(id) = prepared_id {
                    self.on_prepared(captured_id, id);
                }
            }
            Command::Execute if !is_replayed => {
                let prepared = captured_id(record).and_then(|id| self.prepared.get_mut(&id));
                if let Some(prepared) = prepared {
                    prepared.learn_types(&record.payload);
                }
            }
            Command::CloseStatement => {
                captured_id(record).map(|id| self.prepared.remove(&id));
            }
            Command::ChangeUser | Command::ResetConnection => {
                self.prepared.clear();
                self.prepared_reads.clear();
                self.has_restored_states = false;
            }
            Command::Query => self.learn_text(text_of(record), is_replayed),
            _ => {}
        }
    }

    fn learn_text(&mut self, text: &[u8], is_replayed: bool) {
        if !sql_text::may_begin_with(text, b"use") && !sql_text::may_begin_with(text, b"set") && !text.contains(&b';') {
            return;
        }
        for statement in sql_text::statements(text) {
            if let Some(database) = sql_text::used_database(&statement) {
                self.database = database;
            } else if let Some(states) = sql_text::session_states(&statement) {
                self.learn_states(&states, is_replayed);
            }
        }
    }

    /// Learns the statements that `SET SESSION_STATES` prepares (pingcap/tidb
    /// `pkg/sessionctx/sessionstates/session_states.go`).
    fn learn_states(&mut self, states: &[u8], is_replayed: bool) {
        self.has_restored_states = is_replayed;
        let Ok(states) = serde_json::from_slice::<SessionStates>(states) else { return };
        if !states.database.is_empty() {
            self.database = states.database.into_bytes();
        }
        for (id, statement) in states.prepared {
            let types = BASE64.decode(statement.types.as_bytes()).unwrap_or_default();
            let target_id = is_replayed.then_some(id);
            let prepared = Prepared::restored(statement.text.as_bytes(), types, target_id, &mut self.normalizer);
            if statement.name.is_empty() {
                self.prepared.insert(id, prepared);
            } else if is_replayed {
                let is_read = prepared.is_read;
                let name = sql_text::lowercase(format!("`{}`", statement.name).as_bytes());
                self.prepared_reads.admit(&[StatementKind::Prepare { name, is_read }]);
            }
        }
    }

    /// The connection is lost, and with it what the target knew of the session.
    pub(crate) fn on_disconnected(&mut self) {
        self.prepared.values_mut().for_each(|prepared| prepared.set_id(None));
        self.prepared_reads.clear();
        self.has_restored_states = false;
    }

    /// The text of the statement that a command runs. None: it runs none, or an unknown one.
    pub(crate) fn statement<'a>(&'a self, record: &'a Record) -> Option<&'a [u8]> {
        match record.command {
            Command::Query | Command::Prepare => Some(text_of(record)),
            Command::Execute
            | Command::BulkExecute
            | Command::SendLongData
            | Command::Fetch
            | Command::ResetStatement
            | Command::CloseStatement => {
                let known = captured_id(record).and_then(|id| self.prepared.get(&id));
                known.map(|prepared| prepared.text.as_slice()).or(record.prepared_text.as_deref())
            }
            _ => None,
        }
    }
}

/// What `SET SESSION_STATES` contains, as far as it matters.
#[derive(Deserialize)]
struct SessionStates {
    #[serde(rename = "prepared-stmts", default)]
    prepared: HashMap<u32, RestoredStatement>,
    #[serde(rename = "current-db", default)]
    database: String,
}

#[derive(Deserialize)]
struct RestoredStatement {
    text: String,
    /// Empty: it was prepared with COM_STMT_PREPARE.
    #[serde(default)]
    name: String,
    /// The types of its parameters, in base64.
    #[serde(default)]
    types: String,
}

/// The statement's id in the capture.
fn captured_id(record: &Record) -> Option<u32> {
    record.prepared_id.or_else(|| record.payload.first_chunk().map(|id| u32::from_le_bytes(*id)))
}

/// The text in COM_QUERY or COM_STMT_PREPARE. TiDB ignores a zero byte at the end.
fn text_of(record: &Record) -> &[u8] {
    record.payload.strip_suffix(b"\0").unwrap_or(&record.payload)
}

#[cfg(test)]
mod tests;
