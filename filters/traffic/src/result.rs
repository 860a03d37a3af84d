//! Result lines: what the server answered to a command of the traffic file beside, one JSON object per line.

use std::borrow::Cow;

use serde::Deserialize;

use crate::text::{parse_hexadecimal, push_decimal, push_hexadecimal, push_signed};

/// What a command got as its result. `connection` and `time_ns` together identify the command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResultLine {
    pub connection: u64,
    /// When the command began: nanoseconds since 1970.
    pub time_ns: i64,
    /// Until the last byte of the response.
    pub latency_us: u64,
    /// Rows of all result sets.
    pub rows: u64,
    /// Bytes of the response.
    pub bytes: u64,
    /// The server's error code; 0: none.
    pub error: u16,
    /// See [`crate::checksum`]. None: the response had no result set.
    pub checksum: Option<u64>,
    /// TiDB's digest of the statement. None: the command has no statement.
    pub digest: Option<[u8; 32]>,
    pub user: String,
    pub database: String,
    /// Which server answered.
    pub node: String,
}

impl ResultLine {
    pub fn as_ref(&self) -> ResultRef<'_> {
        ResultRef {
            connection: self.connection,
            time_ns: self.time_ns,
            latency_us: self.latency_us,
            rows: self.rows,
            bytes: self.bytes,
            error: self.error,
            checksum: self.checksum,
            digest: self.digest.as_ref(),
            user: self.user.as_bytes(),
            database: self.database.as_bytes(),
            node: self.node.as_bytes(),
        }
    }
}

/// A [`ResultLine`] that is not owned. Bytes of names that are no UTF-8 are replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResultRef<'a> {
    pub connection: u64,
    pub time_ns: i64,
    pub latency_us: u64,
    pub rows: u64,
    pub bytes: u64,
    pub error: u16,
    pub checksum: Option<u64>,
    pub digest: Option<&'a [u8; 32]>,
    pub user: &'a [u8],
    pub database: &'a [u8],
    pub node: &'a [u8],
}

/// A line of a results file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Line {
    Result(ResultLine),
    /// Here, `count` commands are missing in both files, since the disk was slow or full.
    Dropped {
        count: u64,
        time_ns: i64,
    },
}

/// Why a line cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LineError {
    #[error("{0}")]
    Json(String),
    #[error("'{0}' is not a checksum of 16 hexadecimal digits")]
    Checksum(String),
    #[error("'{0}' is not a digest of 64 hexadecimal digits")]
    Digest(String),
}

/// Appends a line with its line feed. Allocates nothing but what `out` needs.
pub fn encode(result: ResultRef<'_>, out: &mut Vec<u8>) {
    out.extend_from_slice(b"{\"conn\":");
    push_decimal(out, result.connection);
    out.extend_from_slice(b",\"time\":");
    push_signed(out, result.time_ns);
    out.extend_from_slice(b",\"us\":");
    push_decimal(out, result.latency_us);
    out.extend_from_slice(b",\"rows\":");
    push_decimal(out, result.rows);
    out.extend_from_slice(b",\"bytes\":");
    push_decimal(out, result.bytes);
    out.extend_from_slice(b",\"error\":");
    push_decimal(out, result.error.into());
    out.extend_from_slice(b",\"checksum\":");
    push_hexadecimal_or_null(out, result.checksum.map(u64::to_be_bytes).as_ref().map(<[u8; 8]>::as_slice));
    out.extend_from_slice(b",\"digest\":");
    push_hexadecimal_or_null(out, result.digest.map(<[u8; 32]>::as_slice));
    for (key, text) in [
        (b",\"user\":".as_slice(), result.user),
        (b",\"database\":".as_slice(), result.database),
        (b",\"node\":".as_slice(), result.node),
    ] {
        out.extend_from_slice(key);
        push_string(out, text);
    }
    out.extend_from_slice(b"}\n");
}

/// Appends a line that says that commands are missing.
pub fn encode_dropped(count: u64, time_ns: i64, out: &mut Vec<u8>) {
    out.extend_from_slice(b"{\"dropped\":");
    push_decimal(out, count);
    out.extend_from_slice(b",\"time\":");
    push_signed(out, time_ns);
    out.extend_from_slice(b"}\n");
}

/// Reads a line, with or without its line feed. Keys that are not known are skipped.
pub fn parse(line: &[u8]) -> Result<Line, LineError> {
    let fields: Fields<'_> = serde_json::from_slice(line).map_err(|error| LineError::Json(error.to_string()))?;
    let missing = |key: &str| LineError::Json(format!("missing field `{key}`"));
    let time_ns = fields.time.ok_or_else(|| missing("time"))?;
    if let Some(count) = fields.dropped {
        return Ok(Line::Dropped { count, time_ns });
    }
    Ok(Line::Result(ResultLine {
        connection: fields.conn.ok_or_else(|| missing("conn"))?,
        time_ns,
        latency_us: fields.us.ok_or_else(|| missing("us"))?,
        rows: fields.rows,
        bytes: fields.bytes,
        error: fields.error,
        checksum: match fields.checksum {
            Some(Hexadecimal(text)) => {
                let bytes = parse_hexadecimal(&text).ok_or_else(|| LineError::Checksum(text.into_owned()))?;
                Some(u64::from_be_bytes(bytes))
            }
            None => None,
        },
        digest: match fields.digest {
            Some(Hexadecimal(text)) => {
                Some(parse_hexadecimal(&text).ok_or_else(|| LineError::Digest(text.into_owned()))?)
            }
            None => None,
        },
        user: fields.user.into_owned(),
        database: fields.database.into_owned(),
        node: fields.node.into_owned(),
    }))
}

#[derive(Deserialize)]
struct Fields<'a> {
    conn: Option<u64>,
    time: Option<i64>,
    us: Option<u64>,
    #[serde(default)]
    rows: u64,
    #[serde(default)]
    bytes: u64,
    #[serde(default)]
    error: u16,
    #[serde(borrow)]
    checksum: Option<Hexadecimal<'a>>,
    #[serde(borrow)]
    digest: Option<Hexadecimal<'a>>,
    #[serde(borrow, default)]
    user: Cow<'a, str>,
    #[serde(borrow, default)]
    database: Cow<'a, str>,
    #[serde(borrow, default)]
    node: Cow<'a, str>,
    dropped: Option<u64>,
}

/// A text that is borrowed if it has no escapes, also within an Option.
#[derive(Deserialize)]
struct Hexadecimal<'a>(#[serde(borrow)] Cow<'a, str>);

fn push_hexadecimal_or_null(out: &mut Vec<u8>, bytes: Option<&[u8]>) {
    let Some(bytes) = bytes else {
        out.extend_from_slice(b"null");
        return;
    };
    out.push(b'"');
    push_hexadecimal(out, bytes);
    out.push(b'"');
}

fn push_string(out: &mut Vec<u8>, text: &[u8]) {
    out.push(b'"');
    for chunk in text.utf8_chunks() {
        for byte in chunk.valid().bytes() {
            match byte {
                b'"' | b'\\' => out.extend_from_slice(&[b'\\', byte]),
                0..0x20 => {
                    out.extend_from_slice(b"\\u00");
                    push_hexadecimal(out, &[byte]);
                }
                _ => out.push(byte),
            }
        }
        if !chunk.invalid().is_empty() {
            out.extend_from_slice("\u{fffd}".as_bytes());
        }
    }
    out.push(b'"');
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{Strategy, any, prop, prop_assert_eq, proptest};

    use super::*;

    fn encoded(result: ResultRef<'_>) -> Vec<u8> {
        let mut out = Vec::new();
        encode(result, &mut out);
        out
    }

    fn example() -> ResultLine {
        ResultLine {
            connection: 1,
            time_ns: 1_795_818_422_123_456_789,
            latency_us: 512,
            rows: 3,
            bytes: 900,
            error: 0,
            checksum: Some(0x0123_4567_89ab_cdef),
            digest: Some([0xe1; 32]),
            user: "app".into(),
            database: "shop".into(),
            node: "tidb-0:4000".into(),
        }
    }

    #[test]
    fn a_line_has_all_keys() {
        let expected = format!(
            "{{\"conn\":1,\"time\":1795818422123456789,\"us\":512,\"rows\":3,\"bytes\":900,\"error\":0,\
             \"checksum\":\"0123456789abcdef\",\"digest\":\"{}\",\"user\":\"app\",\"database\":\"shop\",\
             \"node\":\"tidb-0:4000\"}}\n",
            "e1".repeat(32)
        );
        assert_eq!(String::from_utf8_lossy(&encoded(example().as_ref())), expected);
    }

    #[test]
    fn names_that_are_no_text_are_replaced() {
        let example = example();
        let line = encoded(ResultRef { user: b"a\xff\"\n", ..example.as_ref() });
        let Line::Result(result) = parse(&line).expect("valid line") else {
            panic!("not a result");
        };
        assert_eq!(result.user, "a\u{fffd}\"\n");
    }

    #[test]
    fn dropped_commands_are_read_back() {
        let mut out = Vec::new();
        encode_dropped(12, -5, &mut out);
        assert_eq!(out, b"{\"dropped\":12,\"time\":-5}\n");
        assert_eq!(parse(&out), Ok(Line::Dropped { count: 12, time_ns: -5 }));
    }

    #[test]
    fn errors_say_what_is_wrong() {
        let cases = [
            ("", "EOF while parsing a value at line 1 column 0"),
            ("{\"conn\":1}", "missing field `time`"),
            ("{\"time\":1}", "missing field `conn`"),
            ("{\"conn\":1,\"time\":1}", "missing field `us`"),
            ("{\"conn\":1,\"time\":1,\"us\":1,\"checksum\":\"12\"}", "'12' is not a checksum of 16 hexadecimal digits"),
            ("{\"conn\":1,\"time\":1,\"us\":1,\"digest\":\"\"}", "'' is not a digest of 64 hexadecimal digits"),
        ];
        for (text, expected) in cases {
            assert_eq!(parse(text.as_bytes()).expect_err("wrong line").to_string(), expected, "{text}");
        }
    }

    fn result() -> impl Strategy<Value = ResultLine> {
        let numbers = (any::<u64>(), any::<i64>(), any::<u64>(), any::<u64>(), any::<u64>(), any::<u16>());
        let hashes = (any::<Option<u64>>(), prop::option::of(any::<[u8; 32]>()));
        let names = (any::<String>(), any::<String>(), any::<String>());
        (numbers, hashes, names).prop_map(|(numbers, (checksum, digest), (user, database, node))| {
            let (connection, time_ns, latency_us, rows, bytes, error) = numbers;
            ResultLine { connection, time_ns, latency_us, rows, bytes, error, checksum, digest, user, database, node }
        })
    }

    proptest! {
        #[test]
        fn lines_are_read_back(result in result()) {
            let line = encoded(result.as_ref());
            prop_assert_eq!(line.iter().position(|byte| *byte == b'\n'), Some(line.len() - 1));
            prop_assert_eq!(parse(&line), Ok(Line::Result(result)));
        }

        #[test]
        fn no_line_panics(line in prop::collection::vec(any::<u8>(), 0..100)) {
            parse(&line).ok();
        }
    }
}
