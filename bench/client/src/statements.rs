//! The statements that a load asks, encoded before it begins so that sending them costs nothing.

use crate::packets::query;

/// Statements with different numbers. More would tell no more, and take room in the processor's cache.
const POOL: usize = 1024;
/// What the number stands for.
const PLACE: &str = "{}";
/// The same numbers in each run: runs are compared.
const SEED: u64 = 1;

#[derive(Debug)]
pub(crate) struct Statements {
    packets: Vec<Vec<u8>>,
    next: usize,
}

impl Statements {
    /// Each `{}` of a statement becomes the same random number from 1 to `numbers`.
    pub(crate) fn new(text: &str, numbers: u64) -> Self {
        let mut dice = fastrand::Rng::with_seed(SEED);
        let count = if text.contains(PLACE) { POOL } else { 1 };
        let packets = (0..count).map(|_| query(&text.replace(PLACE, &dice.u64(1..=numbers).to_string()))).collect();
        Self { packets, next: 0 }
    }

    /// The packet of the next one, in turn.
    pub(crate) fn next(&mut self) -> &[u8] {
        let packet = &self.packets[self.next];
        self.next = (self.next + 1) % self.packets.len();
        packet
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The text of so many in turn.
    fn texts(statements: &mut Statements, count: usize) -> Vec<String> {
        (0..count).map(|_| String::from_utf8_lossy(&statements.next()[5..]).into_owned()).collect()
    }

    #[test]
    fn without_a_place_there_is_one() {
        let mut statements = Statements::new("select 1", 100);
        assert_eq!(statements.next(), query("select 1"));
        assert_eq!(texts(&mut statements, 3), ["select 1"; 3]);
    }

    #[test]
    fn numbers_are_in_range_and_the_same_each_time() {
        let found = texts(&mut Statements::new("do {}", 7), POOL);
        let mut numbers: Vec<u64> = found.iter().map(|text| text[3..].parse().expect("a number")).collect();
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers, [1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(texts(&mut Statements::new("do {}", 7), POOL), found);
    }

    #[test]
    fn one_statement_has_one_number_and_all_take_turns() {
        let mut statements = Statements::new("between {} and {}+999", 100_000);
        let found = texts(&mut statements, POOL);
        for text in &found {
            let rest = text.strip_prefix("between ").and_then(|rest| rest.strip_suffix("+999")).expect("the text");
            let (from, to) = rest.split_once(" and ").expect("two numbers");
            assert_eq!(from, to);
        }
        assert_eq!(texts(&mut statements, POOL), found);
    }
}
