//! The commands of a session whose responses are not complete, and their statements.

use std::borrow::Cow;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;
use std::vec::IntoIter;

use mysql_proto::command::Command;
use statement_rules::Permit;

use super::super::collector::PreparedStatement;
use super::super::rows::Statement;
use crate::capture::CapturedCommand;
use crate::statement_log::SentText;

#[derive(Debug)]
pub(super) struct RunningCommand {
    pub(super) command: Command,
    /// How many equal commands follow. Clients may send very many ahead.
    pub(super) more: u32,
    /// When the command has begun, or its result before has ended. None: executions are not observed.
    pub(super) since: Option<Instant>,
    pub(super) request_bytes: usize,
    pub(super) content: Content,
    /// What the command uses of limits.
    pub(super) permit: Option<Permit>,
    /// A rule wants the command in the log.
    pub(super) must_log: bool,
    pub(super) capture: CaptureState,
}

/// Whether a command is captured.
#[derive(Debug, Default)]
pub(super) enum CaptureState {
    #[default]
    No,
    /// It will be captured when its request is complete.
    Awaited,
    Yes(Box<CapturedCommand>),
}

impl RunningCommand {
    /// None: the command is not captured.
    pub(super) fn captured(&mut self) -> Option<&mut CapturedCommand> {
        if let CaptureState::Yes(captured) = &mut self.capture { Some(captured) } else { None }
    }

    /// Whether this entry is enough for another such command.
    pub(super) fn can_stand_for(&self, command: Command) -> bool {
        let is_counted_only = matches!(self.content, Content::Other) && self.since.is_none() && self.more < u32::MAX;
        // The content of these commands is still to come.
        let has_content = matches!(
            command,
            Command::Query | Command::Prepare | Command::Execute | Command::BulkExecute | Command::InitDb
        );
        is_counted_only && !has_content && self.command == command
    }
}

/// What a command does.
#[derive(Debug)]
pub(super) enum Content {
    Other,
    Prepares(Rc<PreparedStatement>),
    Selects(Box<[u8]>),
    Runs(Run, IntoIter<Run>),
}

/// A statement that runs.
#[derive(Debug, Default)]
pub(super) struct Run {
    /// None: it is not known.
    pub(super) statement: Option<Arc<Statement>>,
    pub(super) text: KeptText,
    /// The database that it selects.
    pub(super) database: Option<Box<[u8]>>,
}

/// The text of a statement that runs, for the log.
#[derive(Debug, Default)]
pub(super) enum KeptText {
    #[default]
    None,
    Sent(SentText),
    Prepared(Rc<PreparedStatement>),
}

impl Content {
    pub(super) fn runs(mut runs: IntoIter<Run>) -> Self {
        Self::Runs(runs.next().unwrap_or_default(), runs)
    }

    /// The statement that is prepared, or runs now. None: there is none, or it is not known.
    pub(super) fn statement(&self) -> Option<&Arc<Statement>> {
        match self {
            Self::Prepares(prepared) => Some(&prepared.known.statement),
            Self::Runs(run, _) => run.statement.as_ref(),
            Self::Other | Self::Selects(_) => None,
        }
    }

    /// The text of this statement. None: it was not kept.
    pub(super) fn sent_text(&self) -> Option<Cow<'_, SentText>> {
        let text_of = |prepared: &PreparedStatement| Some(Cow::Owned(SentText::new(&prepared.text)));
        match self {
            Self::Prepares(prepared) => text_of(prepared),
            Self::Runs(Run { text: KeptText::Prepared(prepared), .. }, _) => text_of(prepared),
            Self::Runs(Run { text: KeptText::Sent(text), .. }, _) => Some(Cow::Borrowed(text)),
            Self::Runs(Run { text: KeptText::None, .. }, _) | Self::Other | Self::Selects(_) => None,
        }
    }
}
