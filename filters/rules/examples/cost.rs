//! Measures what it costs to judge a statement that no rule fits, with few and with many rules:
//! `cargo run --release --package statement-rules --example cost`

use std::hint::black_box;
use std::time::Instant;

use sql_text::Digest;
use statement_rules::{Class, Request, RuleConfig, RuleSet, StatementInfo};

const ROUNDS: usize = 1_000_000;

fn main() {
    for count in [2, 20, 200, 2000] {
        let configs = (0..count).map(|number| rule(number, count)).collect::<Vec<_>>();
        let start = Instant::now();
        let rules = match RuleSet::new(configs) {
            Ok(rules) => rules,
            Err(errors) => return println!("{errors:?}"),
        };
        let compiled = start.elapsed();
        let statements = (0..1000).map(|id| format!("SELECT name, price FROM products WHERE id = {}", 7919 * id));
        let classify = |text: String| -> (String, Digest, Class) {
            let (digest, class) = rules.classify_text(text.as_bytes());
            (text, digest, class)
        };
        let classes = statements.map(classify).collect::<Vec<_>>();
        let judge_one = |(text, digest, class): &(String, Digest, Class)| {
            let statements = [StatementInfo { text: text.as_bytes(), digest, class }];
            let verdict = rules.judge(black_box(&Request {
                statements: &statements,
                user: b"app",
                database: b"shop",
                group: "main",
                ..Request::default()
            }));
            assert!(verdict.hits.is_empty());
        };
        let judge = |index: usize| judge_one(&classes[index % classes.len()]);
        let start = Instant::now();
        judge(0);
        let first = start.elapsed();
        (0..10_000).for_each(judge);
        let start = Instant::now();
        (0..ROUNDS).for_each(judge);
        let nanoseconds = start.elapsed().as_nanos() / ROUNDS as u128;
        let long = classify(format!("INSERT INTO texts VALUES ('{}')", pseudorandom_words(100_000)));
        let start = Instant::now();
        judge_one(&long);
        let first_long = start.elapsed();
        let start = Instant::now();
        judge_one(&long);
        let megabytes = long.0.len() as f64 / start.elapsed().as_micros() as f64;
        println!("{count:5} rules: {nanoseconds:5} ns a statement; the first {first:?}; compiled in {compiled:?}");
        println!("             long text: {megabytes:.0} MB/s; the first {first_long:?}");
    }
}

/// Half of the rules have patterns, the others digests, normalized texts, and users.
fn rule(number: usize, count: usize) -> RuleConfig {
    let mut config = RuleConfig { name: format!("rule-{number}"), enabled: true, log: true, ..RuleConfig::default() };
    match number % 8 {
        0 => config.pattern = Some(format!(r"delete from orders_{number}\b")),
        1 => config.pattern = Some(format!(r"select .* from archive_{number} where .*customer\s*=\s*{number}")),
        2 => config.pattern = Some(format!(r"sleep\({number}\)|benchmark\({number},")),
        3 => config.pattern = Some(format!(r"\bjoin secret_{number}\b")),
        4 | 5 => config.digest = vec![format!("{:064x}", number * count)],
        6 => config.normalized = Some(format!("from `report_{number}`")),
        _ => config.user = vec![format!("user-{number}")],
    }
    config
}

fn pseudorandom_words(length: usize) -> String {
    let words = ["delete ", "from ", "orders_", "archive_", "select ", "customer", "join ", "secret_", "sleep(", "x"];
    let mut state = 1_u64;
    let mut text = String::with_capacity(length + 16);
    while text.len() < length {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        match state >> 60 {
            index @ 0..10 => text.push_str(words[index as usize]),
            digit => text.push_str(&(digit * (state >> 50)).to_string()),
        }
    }
    text
}
