//! Statements whose answers contain only the nonce of one session, and the check of these answers.

use mysql_proto::lenenc;

use crate::packets::query;
use crate::response::Rows;

/// The exponents of the maximum sizes of answers, in powers of two. One answer in [`RARE`] may be [`LARGE`].
const SIZE: u32 = 16;
const LARGE: u32 = 20;
const RARE: u32 = 40;

/// A text that identifies the bytes of one session: the session's number, and 64 random bits.
pub(crate) fn nonce(number: u64, random: u64) -> String {
    format!("s{number:08x}r{random:016x}")
}

/// A statement and its expected answer.
#[derive(Debug)]
pub(crate) struct Question {
    nonce: String,
    /// How often each row repeats the nonce.
    times: usize,
    rows: u64,
    /// The expected bytes of each row.
    expected: Vec<u8>,
    /// The number of the current row, from 1 on.
    row: u64,
}

impl Question {
    /// A random question, with a small or large answer in one row or many.
    pub(crate) fn choose(rng: &mut fastrand::Rng, nonce: &str) -> Self {
        let power = if rng.u32(..RARE) == 0 { LARGE } else { rng.u32(..=SIZE) };
        let count = (rng.usize(1..=1 << power) / nonce.len()).max(1);
        match rng.u8(..3) {
            0 => Self::new(nonce, 1, 1),
            1 => Self::new(nonce, count, 1),
            _ => {
                let times = rng.usize(1..=count.min(40));
                Self::new(nonce, times, (count / times).max(1) as u64)
            }
        }
    }

    fn new(nonce: &str, times: usize, rows: u64) -> Self {
        let mut expected = Vec::new();
        lenenc::write(&mut expected, (nonce.len() * times) as u64);
        expected.extend(nonce.repeat(times).as_bytes());
        Self { nonce: nonce.into(), times, rows, expected, row: 0 }
    }

    pub(crate) fn rows(&self) -> u64 {
        self.rows
    }

    /// The text of the statement. The name of the column is the nonce, too.
    pub(crate) fn statement(&self) -> String {
        let Self { nonce, times, rows, .. } = self;
        let value = if *times == 1 { format!("'{nonce}'") } else { format!("repeat('{nonce}', {times})") };
        let from = if *rows == 1 { String::new() } else { format!(" from mysql.seq_1_to_{rows}") };
        format!("select {value} as `{nonce}`{from}")
    }

    pub(crate) fn packet(&self) -> Vec<u8> {
        query(&self.statement())
    }
}

impl Rows for Question {
    fn column(&mut self, definition: &[u8]) -> Result<(), String> {
        let nonce = self.nonce.as_bytes();
        if definition.windows(nonce.len()).any(|window| window == nonce) {
            return Ok(());
        }
        Err(format!("the name of the column is not {}: \"{}\"", self.nonce, shown(definition)))
    }

    fn row(&mut self, at: usize, length: usize, bytes: &[u8]) -> Result<(), String> {
        if at == 0 {
            self.row += 1;
        }
        if length != self.expected.len() {
            let (row, due) = (self.row, self.expected.len());
            return Err(format!("row {row} has {length} bytes, where {due} are due: \"{}\"", shown(bytes)));
        }
        let expected = &self.expected[at..at + bytes.len()];
        if bytes == expected {
            return Ok(());
        }
        let wrong = bytes.iter().zip(expected).take_while(|(found, due)| found == due).count();
        let (row, position) = (self.row, at + wrong);
        Err(format!("row {row} has at byte {position} of {length}: \"{}\"", shown(&bytes[wrong..])))
    }
}

fn shown(bytes: &[u8]) -> String {
    bytes[..bytes.len().min(64)].escape_ascii().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nonces_of_sessions_differ() {
        assert_eq!(nonce(17, 255), "s00000011r00000000000000ff");
        assert_ne!(nonce(1, 5), nonce(2, 5));
    }

    #[test]
    fn statement_asks_for_the_expected_answer() {
        assert_eq!(Question::new("n1", 1, 1).statement(), "select 'n1' as `n1`");
        assert_eq!(Question::new("n1", 3, 1).statement(), "select repeat('n1', 3) as `n1`");
        assert_eq!(Question::new("n1", 1, 9).statement(), "select 'n1' as `n1` from mysql.seq_1_to_9");
        assert_eq!(Question::new("n1", 3, 9).expected, b"\x06n1n1n1");
    }

    #[test]
    fn sizes_of_answers_differ_and_have_a_limit() {
        let mut rng = fastrand::Rng::with_seed(2);
        let nonce = nonce(1, 2);
        let sizes: Vec<_> = (0..5000)
            .map(|_| Question::choose(&mut rng, &nonce))
            .map(|question| question.times * question.rows as usize * nonce.len())
            .collect();
        assert!(sizes.iter().all(|&size| (nonce.len()..=1 << LARGE).contains(&size)));
        assert!(sizes.iter().filter(|&&size| size > 65_536).count() > 20);
        assert!(sizes.iter().filter(|&&size| size == nonce.len()).count() > 1000);
    }

    #[test]
    fn wrong_byte_is_reported_at_any_position() {
        let (ours, theirs) = (nonce(1, 7), nonce(2, 7));
        let right = Question::new(&ours, 20, 1).expected;
        let length = right.len();
        for position in 0..length {
            for cut in [0, 1, position, length] {
                let mut bytes = right.clone();
                bytes[position] ^= 1;
                let mut question = Question::new(&ours, 20, 1);
                let outcome =
                    question.row(0, length, &bytes[..cut]).and_then(|()| question.row(cut, length, &bytes[cut..]));
                let error = outcome.expect_err("a wrong byte");
                assert!(error.contains(&format!("at byte {position} of {length}")), "{error}");
            }
        }
        let mut question = Question::new(&ours, 20, 1);
        let other = Question::new(&theirs, 20, 1).expected;
        let error = question.row(0, length, &other).expect_err("bytes of another session");
        assert!(error.contains("2r0000000000000007s00000002r"), "{error}");
        assert!(question.row(0, length + 1, &right).is_err());
        assert!(question.column(format!("\x03def\0\0\0\x1a{theirs}\0").as_bytes()).is_err());
        assert!(question.column(format!("\x03def\0\0\0\x1a{ours}\0").as_bytes()).is_ok());
    }
}
