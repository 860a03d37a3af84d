//! The statements of a load, encoded before the load begins so that sending them is cheap.

use crate::packets::query;

/// The number of statements with different random numbers. More would only take space in the CPU cache.
const POOL: usize = 1024;
/// The text that becomes a random number.
const PLACEHOLDER: &str = "{}";
/// Fixed, so that all runs use the same numbers and can be compared.
const SEED: u64 = 1;

#[derive(Debug)]
pub(crate) struct Statements {
    packets: Vec<Vec<u8>>,
    next: usize,
}

impl Statements {
    /// Each line of `text` is a statement; they take turns. Each `{}` of a statement becomes the same random number from 1
    /// to `max_number`.
    pub(crate) fn new(text: &str, max_number: u64) -> Self {
        let mut rng = fastrand::Rng::with_seed(SEED);
        let lines: Vec<&str> = text.split('\n').collect();
        let count = if text.contains(PLACEHOLDER) { POOL.next_multiple_of(lines.len()) } else { lines.len() };
        let mut statement = |line: &str| line.replace(PLACEHOLDER, &rng.u64(1..=max_number).to_string());
        let packets = (0..count).map(|index| query(&statement(lines[index % lines.len()]))).collect();
        Self { packets, next: 0 }
    }

    /// The packet of the next statement. The first one follows the last.
    pub(crate) fn next(&mut self) -> &[u8] {
        let packet = &self.packets[self.next];
        self.next = (self.next + 1) % self.packets.len();
        packet
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The texts of the next `count` statements.
    fn texts(statements: &mut Statements, count: usize) -> Vec<String> {
        (0..count).map(|_| String::from_utf8_lossy(&statements.next()[5..]).into_owned()).collect()
    }

    #[test]
    fn statement_without_a_placeholder_is_the_only_one() {
        let mut statements = Statements::new("select 1", 100);
        assert_eq!(statements.next(), query("select 1"));
        assert_eq!(texts(&mut statements, 3), ["select 1"; 3]);
    }

    #[test]
    fn statements_of_several_lines_take_turns() {
        assert_eq!(texts(&mut Statements::new("a\nb\nc", 9), 4), ["a", "b", "c", "a"]);
        let with_numbers = texts(&mut Statements::new("a {}\nb {}\nc {}", 9), POOL + 6);
        assert!(with_numbers.iter().zip(["a", "b", "c"].iter().cycle()).all(|(text, first)| text.starts_with(first)));
    }

    #[test]
    fn numbers_are_in_range_and_the_same_in_each_run() {
        let all = texts(&mut Statements::new("do {}", 7), POOL);
        let mut numbers: Vec<u64> = all.iter().map(|text| text[3..].parse().expect("a number")).collect();
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers, [1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(texts(&mut Statements::new("do {}", 7), POOL), all);
    }

    #[test]
    fn placeholders_of_a_statement_get_the_same_number_and_statements_repeat_in_order() {
        let mut statements = Statements::new("between {} and {}+999", 100_000);
        let all = texts(&mut statements, POOL);
        for text in &all {
            let rest = text.strip_prefix("between ").and_then(|rest| rest.strip_suffix("+999")).expect("the text");
            let (from, to) = rest.split_once(" and ").expect("two numbers");
            assert_eq!(from, to);
        }
        assert_eq!(texts(&mut statements, POOL), all);
    }
}
