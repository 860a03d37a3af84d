//! A statement that was prepared with COM_STMT_PREPARE, in the capture and at the target.

use sql_text::Normalizer;

use crate::reads;

/// Statement id, flags, and a number that is always 1 ("COM_STMT_EXECUTE", dev.mysql.com).
const EXECUTE_HEAD: usize = 4 + 1 + 4;
/// The flag that a count of parameters follows, which includes query attributes.
const HAS_COUNT: u8 = 0x08;

#[derive(Debug)]
pub(crate) struct Prepared {
    pub(crate) text: Vec<u8>,
    pub(crate) is_read: bool,
    parameters: usize,
    /// Its id at the target. None: it is not prepared there.
    id: Option<u32>,
    /// The types of the parameters, as a client has sent them last. Empty: unknown. Clients may leave them out when
    /// they execute a statement again.
    types: Vec<u8>,
    has_target_types: bool,
}

impl Prepared {
    pub(crate) fn new(text: &[u8], normalizer: &mut Normalizer) -> Self {
        Self {
            text: text.to_vec(),
            is_read: reads::is_read(text, normalizer),
            parameters: sql_text::parameters(text).len(),
            id: None,
            types: Vec::new(),
            has_target_types: false,
        }
    }

    /// Restored by `SET SESSION_STATES`, with its types. `id`: at the target, if that has restored it.
    pub(crate) fn restored(text: &[u8], types: Vec<u8>, id: Option<u32>, normalizer: &mut Normalizer) -> Self {
        let has_target_types = id.is_some() && !types.is_empty();
        Self { id, types, has_target_types, ..Self::new(text, normalizer) }
    }

    pub(crate) const fn id(&self) -> Option<u32> {
        self.id
    }

    pub(crate) fn set_id(&mut self, id: Option<u32>) {
        self.id = id;
        self.has_target_types = false;
    }

    /// Learns the types in the payload of COM_STMT_EXECUTE.
    pub(crate) fn learn_types(&mut self, payload: &[u8]) {
        if let Some((types, true)) = self.types_at(payload) {
            self.types = payload[types..types + 2 * self.parameters].to_vec();
        }
    }

    /// The payload of COM_STMT_EXECUTE for the target: with its id there, and with types if the target lacks them.
    pub(crate) fn execution(&mut self, id: u32, payload: &[u8]) -> Vec<u8> {
        self.learn_types(payload);
        let mut changed = with_id(id, payload);
        if let Some((at, has_types)) = self.types_at(payload) {
            if !has_types && !self.has_target_types && self.types.len() == 2 * self.parameters {
                changed[at - 1] = 1;
                changed.splice(at..at, self.types.iter().copied());
            }
            self.has_target_types = true;
        }
        changed
    }

    /// Where the types are, or would be, and whether they are there. None: there are no parameters, or the payload is
    /// not understood.
    fn types_at(&self, payload: &[u8]) -> Option<(usize, bool)> {
        if self.parameters == 0 || payload.get(4)? & HAS_COUNT != 0 {
            return None;
        }
        let flag = EXECUTE_HEAD + self.parameters.div_ceil(8);
        match *payload.get(flag)? {
            0 => Some((flag + 1, false)),
            _ => payload.get(flag + 1..flag + 1 + 2 * self.parameters).map(|_| (flag + 1, true)),
        }
    }
}

/// The payload of a command with another statement id.
pub(crate) fn with_id(id: u32, payload: &[u8]) -> Vec<u8> {
    let mut changed = payload.to_vec();
    changed.splice(..payload.len().min(4), id.to_le_bytes());
    changed
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prepared(text: &str) -> Prepared {
        Prepared::new(text.as_bytes(), &mut Normalizer::default())
    }

    fn payload(id: u32, rest: &[u8]) -> Vec<u8> {
        [&id.to_le_bytes()[..], b"\0\x01\0\0\0", rest].concat()
    }

    #[test]
    fn types_are_added_if_the_target_lacks_them() {
        let mut statement = prepared("select ?, ?");
        let with_types = |id| payload(id, b"\0\x01\x08\0\xfd\x00values");
        let without_types = |id| payload(id, b"\0\0values");
        assert_eq!(statement.execution(3, &with_types(7)), with_types(3));
        assert_eq!(statement.execution(3, &without_types(7)), without_types(3));
        // It was prepared again.
        statement.set_id(Some(4));
        assert_eq!(statement.execution(4, &without_types(7)), with_types(4));
        assert_eq!(statement.execution(4, &without_types(7)), without_types(4));
    }

    #[test]
    fn restored_types_are_known_to_the_target() {
        let types = vec![0x01, 0x80];
        let mut normalizer = Normalizer::default();
        let mut statement = Prepared::restored(b"select ?", types, Some(7), &mut normalizer);
        assert_eq!(statement.execution(7, &payload(7, b"\0\0x")), payload(7, b"\0\0x"));
        statement.set_id(Some(1));
        assert_eq!(statement.execution(1, &payload(7, b"\0\0x")), payload(1, b"\0\x01\x01\x80x"));
    }

    #[test]
    fn other_payloads_only_get_the_id() {
        let mut without_parameters = prepared("select 1");
        assert_eq!(without_parameters.execution(3, &payload(7, b"")), payload(3, b""));
        let mut statement = prepared("select ?");
        for rest in [&b""[..], b"\0", b"\0\x01\x08"] {
            assert_eq!(statement.execution(3, &payload(7, rest)), payload(3, rest));
        }
        let with_count = b"\x07\0\0\0\x08\x01\0\0\0\x01\0\0x";
        assert_eq!(statement.execution(7, with_count), with_count);
    }
}
