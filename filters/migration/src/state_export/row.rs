//! Reads the row with states and token while it arrives.

use std::rc::Rc;

use mysql_proto::lenenc;
use mysql_proto::secret::SecretBytes;

use super::{ExportOutcome, ExportedStates};
use crate::budget::{MemoryLimits, Reservation};
use crate::json_scanner::JsonScanner;
use crate::restore::{OverBudget, RestoreBuilder};
use crate::state_summary::{SUMMARY_KEYS, StateSummary, UnusableStates};

/// Maximum bytes of a token, which is sent in a login packet. A token that is signed with RSA is 500 to 900 bytes long.
const MAX_TOKEN: usize = 64 * 1024;
/// Bytes of scanned values that are kept even if the budget is used up. Without them the export could not be undone.
const ALWAYS_KEPT: usize = 64 * 1024;
const NULL: u8 = 0xfb;

/// Collects a length-encoded integer.
#[derive(Debug, Default)]
struct LengthReader {
    bytes: [u8; 9],
    count: usize,
}

impl LengthReader {
    /// Adds a byte. Returns the integer once it is complete.
    fn push(&mut self, byte: u8) -> Option<u64> {
        self.bytes[self.count] = byte;
        self.count += 1;
        lenenc::read(&self.bytes[..self.count]).map(|(length, _)| length)
    }

    /// Whether the first byte does not begin an integer.
    const fn is_invalid(&self) -> bool {
        self.bytes[0] == NULL || self.bytes[0] == 0xff
    }
}

#[derive(Debug)]
enum RowField {
    JsonLength(LengthReader),
    Json(u64),
    TokenLength(LengthReader),
    Token(u64),
    /// The row is complete.
    Finished,
}

#[derive(Debug)]
pub(super) struct Row {
    field: RowField,
    limits: MemoryLimits,
    scan: JsonScanner,
    /// Memory for the values that `scan` keeps.
    reservation: Reservation,
    /// Err: the reason why no statement is built.
    statement: Result<Option<RestoreBuilder>, UnusableStates>,
    token: SecretBytes,
}

impl Row {
    pub(super) fn new(limits: &MemoryLimits) -> Box<Self> {
        Box::new(Self {
            field: RowField::JsonLength(LengthReader::default()),
            scan: JsonScanner::new(&SUMMARY_KEYS),
            reservation: limits.budget.reservation(),
            limits: limits.clone(),
            statement: Ok(None),
            token: SecretBytes::default(),
        })
    }

    /// Processes the next bytes. False: the row is invalid.
    pub(super) fn push(&mut self, bytes: &[u8]) -> bool {
        let mut rest = bytes;
        while let Some(&byte) = rest.first() {
            let mut taken = 1;
            let next = match &mut self.field {
                RowField::JsonLength(length) => match length.push(byte) {
                    Some(0) => return false,
                    Some(length) => {
                        self.begin(length);
                        Some(RowField::Json(length))
                    }
                    None if length.is_invalid() => return false,
                    None => None,
                },
                RowField::TokenLength(length) => match length.push(byte) {
                    Some(0) => Some(RowField::Finished),
                    Some(length) => {
                        if length > MAX_TOKEN as u64 {
                            self.statement = Err(UnusableStates::TooLarge);
                        }
                        Some(RowField::Token(length))
                    }
                    None if byte == NULL && length.count == 1 => Some(RowField::Finished),
                    None if length.is_invalid() => return false,
                    None => None,
                },
                RowField::Json(remaining) => {
                    taken = within(rest, *remaining);
                    *remaining -= taken as u64;
                    let is_last = *remaining == 0;
                    self.json(&rest[..taken]);
                    is_last.then(|| RowField::TokenLength(LengthReader::default()))
                }
                RowField::Token(remaining) => {
                    taken = within(rest, *remaining);
                    *remaining -= taken as u64;
                    if self.statement.is_ok() {
                        self.token.extend_from_slice(&rest[..taken]);
                    }
                    (*remaining == 0).then_some(RowField::Finished)
                }
                RowField::Finished => return false,
            };
            if let Some(next) = next {
                self.field = next;
            }
            rest = &rest[taken..];
        }
        true
    }

    /// The outcome, after the last byte. None: the row is invalid.
    pub(super) fn finish(self) -> Option<ExportOutcome> {
        let RowField::Finished = self.field else { return None };
        let (summary, frame) = StateSummary::from_scan(&self.scan.finish());
        Some(match (self.statement, frame) {
            (Err(unusable), _) => ExportOutcome::Unusable(unusable, summary),
            (Ok(_), _) if self.token.is_empty() => ExportOutcome::NoToken(summary),
            (Ok(_), Err(unusable)) => ExportOutcome::Unusable(unusable, summary),
            (Ok(builder), Ok(frame)) => match builder?.finish(frame) {
                Ok(statement) => {
                    ExportOutcome::States(ExportedStates { statement: Rc::new(statement), token: self.token, summary })
                }
                Err(OverBudget) => ExportOutcome::Unusable(UnusableStates::OverBudget, summary),
            },
        })
    }

    /// Begins the statement for `length` bytes of JSON.
    fn begin(&mut self, length: u64) {
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        self.statement = if length > self.limits.per_session {
            Err(UnusableStates::TooLarge)
        } else {
            let begun = RestoreBuilder::new(length, self.limits.budget.reservation());
            begun.map(Some).map_err(|OverBudget| UnusableStates::OverBudget)
        };
    }

    fn json(&mut self, bytes: &[u8]) {
        let (reservation, limit) = (&mut self.reservation, self.limits.per_session);
        self.scan.push(bytes, |more| {
            let kept = reservation.bytes() + more;
            if kept <= ALWAYS_KEPT {
                reservation.grow_anyway(more);
            }
            kept <= ALWAYS_KEPT || kept <= limit && reservation.grow(more)
        });
        if let Ok(Some(builder)) = &mut self.statement
            && builder.push(bytes) == Err(OverBudget)
        {
            self.statement = Err(UnusableStates::OverBudget);
        }
    }
}

/// How many of `bytes` belong to a field that still lacks `remaining` bytes.
fn within(bytes: &[u8], remaining: u64) -> usize {
    usize::try_from(remaining).map_or(bytes.len(), |remaining| remaining.min(bytes.len()))
}
