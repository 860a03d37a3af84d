//! Times as texts: the RFC 3339 times of records, and the local times in file names.

use crate::text::{parse_decimal, push_digits};

const NANOSECONDS: i64 = 1_000_000_000;
const SECONDS_PER_DAY: i64 = 86_400;

/// A date and a time of day, without a time zone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CivilTime {
    pub(crate) year: i64,
    pub(crate) month: u32,
    pub(crate) day: u32,
    pub(crate) hour: u32,
    pub(crate) minute: u32,
    pub(crate) second: u32,
    pub(crate) nanosecond: u32,
}

impl CivilTime {
    /// `time_ns`: nanoseconds since 1970-01-01.
    pub(crate) fn from_ns(time_ns: i64) -> Self {
        let seconds = time_ns.div_euclid(NANOSECONDS);
        let (year, month, day) = date_of_day(seconds.div_euclid(SECONDS_PER_DAY));
        let second_of_day = seconds.rem_euclid(SECONDS_PER_DAY) as u32;
        Self {
            year,
            month,
            day,
            hour: second_of_day / 3600,
            minute: second_of_day / 60 % 60,
            second: second_of_day % 60,
            nanosecond: time_ns.rem_euclid(NANOSECONDS) as u32,
        }
    }

    /// None: no such date or time of day, or before 1677 or after 2262.
    pub(crate) fn to_ns(self) -> Option<i64> {
        let is_valid = (1..=12).contains(&self.month)
            && (1..=days_of_month(self.year, self.month)).contains(&self.day)
            && self.hour < 24
            && self.minute < 60
            && self.second < 60
            && i64::from(self.nanosecond) < NANOSECONDS;
        if !is_valid {
            return None;
        }
        let days = day_of_date(self.year, i64::from(self.month), i64::from(self.day));
        let second_of_day = i64::from(self.hour * 3600 + self.minute * 60 + self.second);
        let seconds = i128::from(days) * i128::from(SECONDS_PER_DAY) + i128::from(second_of_day);
        (seconds * i128::from(NANOSECONDS) + i128::from(self.nanosecond)).try_into().ok()
    }

    /// `2006-01-02`, a `T`, and the time of day with `separator`.
    pub(crate) fn push(&self, out: &mut Vec<u8>, separator: u8) {
        push_digits(out, self.year as u32, 4);
        out.push(b'-');
        push_digits(out, self.month, 2);
        out.push(b'-');
        push_digits(out, self.day, 2);
        out.push(b'T');
        push_digits(out, self.hour, 2);
        out.push(separator);
        push_digits(out, self.minute, 2);
        out.push(separator);
        push_digits(out, self.second, 2);
    }

    /// Reads what `push` writes and a decimal fraction, and returns what follows.
    pub(crate) fn parse(text: &[u8], separator: u8) -> Option<(Self, &[u8])> {
        let number =
            |start: usize, end: usize| -> Option<u32> { parse_decimal(text.get(start..end)?)?.try_into().ok() };
        let shape = [(4, b'-'), (7, b'-'), (10, b'T'), (13, separator), (16, separator)];
        if !shape.iter().all(|(index, byte)| text.get(*index) == Some(byte)) {
            return None;
        }
        let mut time = Self {
            year: number(0, 4)?.into(),
            month: number(5, 7)?,
            day: number(8, 10)?,
            hour: number(11, 13)?,
            minute: number(14, 16)?,
            second: number(17, 19)?,
            nanosecond: 0,
        };
        let mut rest = &text[19..];
        if let Some(fraction) = rest.strip_prefix(b".") {
            let length = fraction.iter().take_while(|byte| byte.is_ascii_digit()).count();
            if length == 0 {
                return None;
            }
            let used = length.min(9);
            time.nanosecond = (parse_decimal(&fraction[..used])? * 10_u64.pow(9 - used as u32)) as u32;
            rest = &fraction[length..];
        }
        Some((time, rest))
    }
}

/// A dot and the digits of a fraction without trailing zeros; nothing if it is zero.
pub(crate) fn push_fraction(out: &mut Vec<u8>, fraction: u32, width: usize) {
    if fraction == 0 {
        return;
    }
    out.push(b'.');
    push_digits(out, fraction, width);
    while out.last() == Some(&b'0') {
        out.pop();
    }
}

/// UTC, like Go's `time.RFC3339Nano`.
pub fn push_rfc3339(out: &mut Vec<u8>, time_ns: i64) {
    let time = CivilTime::from_ns(time_ns);
    time.push(out, b':');
    push_fraction(out, time.nanosecond, 9);
    out.push(b'Z');
}

/// Nanoseconds since 1970. None: not a time of RFC 3339, or before 1677 or after 2262.
pub fn parse_rfc3339(text: &[u8]) -> Option<i64> {
    let (time, zone) = CivilTime::parse(text, b':')?;
    let offset_seconds = match zone {
        b"Z" => 0,
        [sign @ (b'+' | b'-'), hour @ .., b':', ten, one] if hour.len() == 2 => {
            let (hours, minutes) = (parse_decimal(hour)?, parse_decimal(&[*ten, *one])?);
            if hours > 24 || minutes > 59 {
                return None;
            }
            let seconds = (hours * 3600 + minutes * 60) as i64;
            if *sign == b'-' { -seconds } else { seconds }
        }
        _ => return None,
    };
    time.to_ns()?.checked_sub(offset_seconds * NANOSECONDS)
}

/// The difference of local time from UTC at a time, by the TZ variable or /etc/localtime; 0 if neither says.
pub(crate) fn local_offset_seconds(time_ns: i64) -> i64 {
    let Ok(timestamp) = jiff::Timestamp::from_nanosecond(time_ns.into()) else {
        return 0;
    };
    jiff::tz::TimeZone::system().to_offset(timestamp).seconds().into()
}

pub(crate) fn to_local_ns(time_ns: i64) -> i64 {
    time_ns.saturating_add(local_offset_seconds(time_ns) * NANOSECONDS)
}

fn days_of_month(year: i64, month: u32) -> u32 {
    let is_leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    match month {
        2 => 28 + u32::from(is_leap),
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

/// Days since 1970-01-01. Years begin in March here, so that the leap day is the last one of a year; 400 years
/// always have 146,097 days (howardhinnant.github.io/date_algorithms.html).
fn day_of_date(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let era = year.div_euclid(400);
    let year_of_era = year.rem_euclid(400);
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    let day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;
    era * 146_097 + day_of_era - 719_468
}

fn date_of_day(day: i64) -> (i64, u32, u32) {
    let day = day + 719_468;
    let era = day.div_euclid(146_097);
    let day_of_era = day.rem_euclid(146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = era * 400 + year_of_era + i64::from(month <= 2);
    (year, month as u32, (day_of_year - (153 * shifted_month + 2) / 5 + 1) as u32)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use proptest::prelude::proptest;

    use super::*;

    fn rfc3339(time_ns: i64) -> String {
        let mut out = Vec::new();
        push_rfc3339(&mut out, time_ns);
        String::from_utf8(out).expect("ASCII")
    }

    #[test]
    fn times_are_written_as_go_writes_them() {
        assert_eq!(rfc3339(0), "1970-01-01T00:00:00Z");
        assert_eq!(rfc3339(1_795_818_422_123_456_789), "2026-11-27T22:27:02.123456789Z");
        assert_eq!(rfc3339(1_795_818_422_500_000_000), "2026-11-27T22:27:02.5Z");
        assert_eq!(rfc3339(-1), "1969-12-31T23:59:59.999999999Z");
    }

    #[test]
    fn times_with_an_offset_are_read() {
        let utc = Some(1_795_818_422_123_000_000);
        for text in [
            "2026-11-27T22:27:02.123Z",
            "2026-11-28T06:27:02.123+08:00",
            "2026-11-27T18:57:02.123000000-03:30",
            "2026-11-27T22:27:02.12300000000000Z",
        ] {
            assert_eq!(parse_rfc3339(text.as_bytes()), utc, "{text}");
        }
    }

    #[test]
    fn other_texts_are_no_times() {
        for text in [
            "",
            "2026",
            "2026-11-27 22:27:02Z",
            "2026-11-27T22:27:02",
            "2026-11-27T22:27:02.Z",
            "2026-02-29T00:00:00Z",
            "2026-13-01T00:00:00Z",
            "2026-11-27T24:00:00Z",
            "2026-11-27T22:27:60Z",
            "2026-11-27T22:27:02+8:00",
            "2026-11-27T22:27:02+08:60",
            "1600-01-01T00:00:00Z",
            "2300-01-01T00:00:00Z",
            "2026-11-27T22:27:02ZZ",
        ] {
            assert_eq!(parse_rfc3339(text.as_bytes()), None, "{text}");
        }
        assert!(parse_rfc3339(b"2028-02-29T00:00:00Z").is_some());
    }

    /// Compares with `date`, in the zone of this process, and in the other zones in processes of their own.
    #[test]
    fn local_time_is_that_of_the_system() {
        const CHILD: &str = "TIDEVOY_TEST_CHILD";
        let offset = Command::new("date").args(["--date=@1795818422", "+%:z"]).output().expect("date").stdout;
        let local_noon = [b"2026-11-27T12:00:00", offset.trim_ascii()].concat();
        let offset_ns =
            parse_rfc3339(b"2026-11-27T12:00:00Z").zip(parse_rfc3339(&local_noon)).map(|(utc, local)| utc - local);
        assert_eq!(Some(local_offset_seconds(1_795_818_422_123_456_789) * 1_000_000_000), offset_ns);
        if std::env::var_os(CHILD).is_some() {
            return;
        }
        for zone in ["CST-8", "NST3:30", ":Asia/Shanghai", "UTC"] {
            let output = Command::new(std::env::current_exe().expect("path of this program"))
                .args(["--quiet", "--exact", "time::tests::local_time_is_that_of_the_system"])
                .env("TZ", zone)
                .env(CHILD, "1")
                .output();
            assert!(output.expect("process").status.success(), "{zone}");
        }
    }

    proptest! {
        #[test]
        fn times_are_read_back(time_ns: i64) {
            assert_eq!(parse_rfc3339(rfc3339(time_ns).as_bytes()), Some(time_ns));
        }

        #[test]
        fn dates_agree_with_another_implementation(time_ns: i64) {
            let timestamp = jiff::Timestamp::from_nanosecond(time_ns.into()).expect("in range");
            assert_eq!(rfc3339(time_ns), timestamp.to_string());
        }
    }
}
