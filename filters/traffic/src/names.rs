//! Names of files: `traffic-<time>.log.gz`, `results-<time>.jsonl.gz`, and with `.open` while they are written.
//!
//! Earlier releases of TiProxy number files (`traffic-1.log`), or name the last one `traffic.log`.

use std::time::{SystemTime, UNIX_EPOCH};

use crate::text::parse_decimal;
use crate::time::{CivilTime, push_fraction, to_local_ns};

/// The name of the file that describes a directory; see [`crate::meta`].
pub const META: &str = "meta";

const OPEN: &str = ".open";
const GZIP: &str = ".gz";

/// The last file of TiProxy 1.3.
const LAST: &str = "traffic.log";

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Records.
    Traffic,
    /// Result lines.
    Results,
}

impl Kind {
    fn prefix(self) -> &'static str {
        match self {
            Self::Traffic => "traffic-",
            Self::Results => "results-",
        }
    }

    fn extension(self) -> &'static str {
        match self {
            Self::Traffic => ".log",
            Self::Results => ".jsonl",
        }
    }
}

/// What the name of a file says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileName {
    pub kind: Kind,
    /// The time as it stands in the name, or the number. A traffic file and its results file have the same.
    pub stamp: String,
    /// By which files are ordered: the time in nanoseconds since 1970 by local clocks, or the number.
    pub order: i64,
    /// The file was not closed: either it is still being written, or its writer ended abnormally.
    pub is_open: bool,
    pub is_gzip: bool,
}

/// The name of a gzip file. `time`: when it is closed; for an open file, when it was opened.
pub fn file_name(kind: Kind, time: SystemTime, is_open: bool) -> String {
    let open = if is_open { OPEN } else { "" };
    format!("{}{}{}{GZIP}{open}", kind.prefix(), stamp(time), kind.extension())
}

/// Local time as Go's layout `2006-01-02T15-04-05.999` prints it: up to three decimals, without trailing zeros.
pub fn stamp(time: SystemTime) -> String {
    local_stamp(to_local_ns(nanoseconds(time)))
}

/// Milliseconds of the local clock, which names show. Clocks that are set back, as in autumn, repeat them.
pub fn local_milliseconds(time: SystemTime) -> i64 {
    to_local_ns(nanoseconds(time)).div_euclid(1_000_000)
}

fn local_stamp(local_ns: i64) -> String {
    let time = CivilTime::from_ns(local_ns);
    let mut out = Vec::with_capacity(23);
    time.push(&mut out, b'-');
    push_fraction(&mut out, time.nanosecond / 1_000_000, 3);
    String::from_utf8(out).unwrap_or_default()
}

/// None: not the name of a traffic or results file.
pub fn parse(name: &str) -> Option<FileName> {
    let closed = name.strip_suffix(OPEN);
    let is_open = closed.is_some();
    let name = closed.unwrap_or(name);
    let plain = name.strip_suffix(GZIP);
    let is_gzip = plain.is_some();
    let name = plain.unwrap_or(name);
    if name == LAST {
        let stamp = String::new();
        return Some(FileName { kind: Kind::Traffic, stamp, order: i64::MAX, is_open, is_gzip });
    }
    for kind in [Kind::Traffic, Kind::Results] {
        let stamp = name.strip_prefix(kind.prefix()).and_then(|name| name.strip_suffix(kind.extension()));
        if let Some(stamp) = stamp {
            return Some(FileName { kind, stamp: stamp.into(), order: order_of(stamp)?, is_open, is_gzip });
        }
    }
    None
}

fn order_of(stamp: &str) -> Option<i64> {
    if let Some(number) = parse_decimal(stamp.as_bytes()) {
        return number.try_into().ok();
    }
    let (time, rest) = CivilTime::parse(stamp.as_bytes(), b'-')?;
    time.to_ns().filter(|_| rest.is_empty())
}

fn nanoseconds(time: SystemTime) -> i64 {
    match time.duration_since(UNIX_EPOCH) {
        Ok(since) => i64::try_from(since.as_nanos()).unwrap_or(i64::MAX),
        Err(before) => i64::try_from(before.duration().as_nanos()).map_or(i64::MIN, |nanoseconds| -nanoseconds),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::proptest;

    use super::*;

    const TIME_NS: i64 = 1_795_818_422_120_456_789;

    #[test]
    fn fractions_have_no_trailing_zeros() {
        assert_eq!(local_stamp(TIME_NS), "2026-11-27T22-27-02.12");
        assert_eq!(local_stamp(TIME_NS + 3_000_000), "2026-11-27T22-27-02.123");
        assert_eq!(local_stamp(TIME_NS - 120_000_000), "2026-11-27T22-27-02");
    }

    #[test]
    fn names_are_read_back() {
        let time = UNIX_EPOCH + Duration::from_nanos(TIME_NS as u64);
        for kind in [Kind::Traffic, Kind::Results] {
            for is_open in [false, true] {
                let name = file_name(kind, time, is_open);
                let parsed = parse(&name).expect("own name");
                assert_eq!((parsed.kind, parsed.is_open, parsed.is_gzip), (kind, is_open, true), "{name}");
                assert_eq!(parsed.stamp, stamp(time));
                assert_eq!(local_stamp(parsed.order), parsed.stamp);
            }
        }
    }

    #[test]
    fn tiproxy_may_write_without_compression() {
        let name = parse("traffic-2026-11-27T22-27-02.1.log").expect("name of TiProxy");
        assert!(!name.is_gzip && !name.is_open);
        assert_eq!(local_stamp(name.order), "2026-11-27T22-27-02.1");
    }

    #[test]
    fn earlier_releases_of_tiproxy_have_other_names() {
        let order = |name: &str| parse(name).map(|name| (name.order, name.is_gzip));
        assert_eq!(order("traffic-2.log.gz"), Some((2, true)));
        assert_eq!(order("traffic-10.log"), Some((10, false)));
        assert_eq!(order("traffic.log"), Some((i64::MAX, false)));
    }

    #[test]
    fn other_names_are_refused() {
        for name in [
            "traffic-99999999999999999999.log",
            "traffic--1.log",
            "results.jsonl",
            "meta",
            "traffic-.log",
            "traffic-2026-11-27T22-27-02.log.tmp",
            "traffic-2026-11-27T22:27:02.log.gz",
            "traffic-2026-11-31T22-27-02.log.gz",
            "traffic-2026-11-27T22-27-02.12x.log.gz",
            "traffic-2026-11-27T22-27-02.jsonl.gz",
            "results-2026-11-27T22-27-02.log.gz",
            "tidb-audit-2026-11-27T22-27-02.log",
        ] {
            assert_eq!(parse(name), None, "{name}");
        }
    }

    proptest! {
        #[test]
        fn no_name_panics(name: String) {
            parse(&name);
            parse(&format!("traffic-{name}.log"));
        }
    }
}
