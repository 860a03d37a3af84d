//! Prints a line for each statement on standard input: its digest and its normalized text, in hexadecimal. A zero byte
//! ends each statement. `tests/tidb/test_digests.py` compares the output with TiDB.

use std::io::{Read, Write, stdin, stdout};

use sql_text::hexadecimal;

fn main() -> std::io::Result<()> {
    let mut input = Vec::new();
    stdin().read_to_end(&mut input)?;
    let mut normalizer = sql_text::Normalizer::default();
    let mut output = stdout().lock();
    for statement in input.strip_suffix(b"\0").unwrap_or(&input).split(|byte| *byte == 0) {
        let normalized = normalizer.normalize(statement);
        writeln!(output, "{} {}", hexadecimal(&sql_text::digest(normalized)), hexadecimal(normalized))?;
    }
    Ok(())
}
