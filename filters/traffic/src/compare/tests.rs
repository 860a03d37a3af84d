use std::convert::Infallible;

use proptest::prelude::{any, prop, prop_assert_eq, proptest};
use serde_json::json;
use tempfile::tempdir;

use super::*;
use crate::gzip::gzip_member;
use crate::result;

const READ: Option<[u8; 32]> = Some([0xaa; 32]);
const WRITE: Option<[u8; 32]> = Some([0xbb; 32]);

fn line(time_ns: i64, digest: Option<[u8; 32]>, latency_us: u64) -> ResultLine {
    ResultLine {
        connection: 1,
        time_ns,
        latency_us,
        rows: 1,
        bytes: 10,
        error: 0,
        checksum: Some(7),
        digest,
        user: String::new(),
        database: String::new(),
        node: String::new(),
    }
}

fn failed(time_ns: i64, digest: Option<[u8; 32]>, error: u16) -> ResultLine {
    ResultLine { error, rows: 0, checksum: None, ..line(time_ns, digest, 1) }
}

fn compared(old: &[ResultLine], new: &[ResultLine]) -> Comparison {
    let lines = |lines: &[ResultLine]| lines.iter().cloned().map(Ok::<_, Infallible>).collect::<Vec<_>>();
    compare(lines(old), lines(new), &Texts::new()).expect("infallible")
}

#[test]
fn a_slower_digest_is_told_from_an_equal_one() {
    let mut old = Vec::new();
    let mut new = Vec::new();
    for time_ns in 0..100 {
        let latency_us = 400 + (time_ns as u64 * 37) % 200;
        old.push(line(time_ns, READ, latency_us));
        new.push(line(time_ns, READ, latency_us * 3 / 2));
        old.push(line(1000 + time_ns, WRITE, latency_us));
        new.push(line(1000 + time_ns, WRITE, 1000 - latency_us));
    }
    new.reverse();
    let comparison = compared(&old, &new);
    let [read, write] = comparison.digests.as_slice() else {
        panic!("not two digests: {comparison:?}");
    };
    assert_eq!(read.digest, Some("aa".repeat(32)));
    assert!(read.ratio.ratio_low.is_some_and(|low| low > 1.49), "{read:?}");
    assert!(read.ratio.ratio_high.is_some_and(|high| high < 1.51), "{read:?}");
    assert!(write.ratio.ratio_low.is_some_and(|low| low < 1.0), "{write:?}");
    assert!(write.ratio.ratio_high.is_some_and(|high| high > 1.0), "{write:?}");
    assert_eq!((read.old.median_us, read.new.median_us), (Some(496), Some(744)));
    assert_eq!((read.statements, read.pairs, read.differing_results), (100, 100, 0));
}

#[test]
fn errors_are_new_or_gone_by_pair() {
    let old =
        [failed(1, READ, 1146), failed(2, READ, 1146), failed(3, READ, 1213), line(4, READ, 5), failed(5, None, 1)];
    let new =
        [failed(1, READ, 1146), line(2, READ, 5), failed(3, READ, 1105), failed(4, READ, 1213), failed(5, None, 1)];
    let comparison = compared(&old, &new);
    let count = |code, other_count| ErrorCount { digest: Some("aa".repeat(32)), code, count: 1, other_count };
    assert_eq!(comparison.new_errors, [count(1105, 0), count(1213, 1)]);
    assert_eq!(comparison.gone_errors, [count(1146, 1), count(1213, 1)]);
    assert_eq!((comparison.totals.new_errors, comparison.totals.gone_errors), (2, 2));
    assert_eq!((comparison.totals.old.errors, comparison.totals.new.errors), (4, 4));
    assert_eq!(comparison.totals.old.median_us, None);
    assert_eq!(comparison.totals.differing_results, 0);
}

#[test]
fn results_differ_in_rows_or_checksum() {
    let old: Vec<ResultLine> = (1..=5).map(|time_ns| line(time_ns, READ, 5)).collect();
    let mut new = old.clone();
    new[0].rows = 2;
    new[1].checksum = Some(8);
    new[2].checksum = None;
    new[3] = failed(4, READ, 1105);
    let comparison = compared(&old, &new);
    assert_eq!(comparison.digests[0].differing_results, 3);
    assert_eq!(comparison.totals.differing_results, 3);
    assert_eq!(comparison.totals.ratio, Ratio::default());
}

#[test]
fn statements_on_one_side_only_are_counted() {
    let old = [line(1, READ, 5), line(2, READ, 5), line(3, WRITE, 5)];
    let new = [line(2, READ, 5), line(4, None, 5), line(2, READ, 5)];
    let comparison = compared(&old, &new);
    let totals = &comparison.totals;
    assert_eq!((totals.old_statements, totals.new_statements), (3, 3));
    // A second result for the same statement has no pair.
    assert_eq!((totals.pairs, totals.missing, totals.extra), (1, 2, 2));
    let counts = comparison.digests.iter().map(|digest| (digest.statements, digest.missing, digest.extra));
    assert_eq!(counts.collect::<Vec<_>>(), [(2, 1, 1), (1, 1, 0), (0, 0, 1)]);
}

#[test]
fn directories_are_compared() {
    let directory = tempdir().expect("temporary directory");
    let write = |name: &str, content: &[u8]| {
        let path = directory.path().join(name);
        fs::create_dir_all(path.parent().expect("within the directory")).expect("directory");
        fs::write(path, content).expect("file");
    };
    let lines = |results: &[ResultLine]| {
        let (mut lines, mut out) = (Vec::new(), Vec::new());
        results.iter().for_each(|line| result::encode(line.as_ref(), &mut lines));
        result::encode_dropped(3, 0, &mut lines);
        gzip_member(&lines, &mut out);
        out
    };
    write("a/envoy-1/results-2026-11-27T22-27-02.jsonl.gz", &lines(&[line(1, READ, 100)]));
    write("a/envoy-2/results-2026-11-27T22-27-02.jsonl.gz", &lines(&[line(2, None, 300)]));
    write("b/results-2026-11-27T22-27-02.jsonl.gz", &lines(&[line(1, READ, 200), line(2, None, 300)]));
    let texts = json!({"aa".repeat(32): "select ?", "not a digest": "x"});
    write("b/statements.json", texts.to_string().as_bytes());
    let path = |name: &str| vec![directory.path().join(name)];
    let comparison = compare_directories(&path("a"), &path("b")).expect("comparison");
    let no_ratio = json!({"ratio": null, "ratio_low": null, "ratio_high": null});
    let side =
        |median: u64, p95: u64, mean: f64| json!({"median_us": median, "p95_us": p95, "mean_us": mean, "errors": 0});
    let with_ratio = |mut object: serde_json::Value| {
        object.as_object_mut().expect("object").extend(no_ratio.as_object().expect("object").clone());
        object
    };
    let digest = |digest: Option<String>, text: Option<&str>, old: u64, new: u64| {
        with_ratio(json!({
            "digest": digest, "text": text, "statements": 1, "pairs": 1, "missing": 0, "extra": 0,
            "old": side(old, old, old as f64), "new": side(new, new, new as f64), "differing_results": 0,
        }))
    };
    let expected = json!({
        "totals": with_ratio(json!({
            "old_statements": 2, "new_statements": 2, "pairs": 2, "missing": 0, "extra": 0,
            "old_dropped": 6, "new_dropped": 3, "new_errors": 0, "gone_errors": 0, "differing_results": 0,
            "old": side(100, 300, 200.0), "new": side(200, 300, 250.0),
        })),
        "digests": [
            digest(None, None, 300, 300),
            digest(Some("aa".repeat(32)), Some("select ?"), 100, 200),
        ],
        "new_errors": [],
        "gone_errors": [],
    });
    assert_eq!(serde_json::to_value(&comparison).expect("JSON"), expected);

    write("b/statements.json", b"[]");
    let error = compare_directories(&path("a"), &path("b")).expect_err("wrong texts").to_string();
    assert!(error.contains("statements.json: invalid type: sequence, expected a map"), "{error}");
    assert!(matches!(compare_directories(&path("a"), &path("c")), Err(TrafficError::Io { .. })));
}

proptest! {
    #[test]
    fn each_result_is_counted_once(
        old in prop::collection::vec((0..20_i64, any::<bool>(), 0..3_u16), 0..40),
        new in prop::collection::vec((0..20_i64, any::<bool>(), 0..3_u16), 0..40),
    ) {
        let lines = |lines: &[(i64, bool, u16)]| {
            let line = |(time_ns, is_read, error): &(i64, bool, u16)| {
                ResultLine { error: *error, ..line(*time_ns, if *is_read { READ } else { WRITE }, 5) }
            };
            lines.iter().map(line).collect::<Vec<_>>()
        };
        let totals = compared(&lines(&old), &lines(&new)).totals;
        prop_assert_eq!(totals.pairs + totals.missing, old.len() as u64);
        prop_assert_eq!(totals.pairs + totals.extra, new.len() as u64);
    }
}
