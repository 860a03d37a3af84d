//! Length-encoded integers: one byte for values below 251, else a marker byte and 2, 3 or 8 bytes.

/// Reads the integer at the front of `bytes`. Returns its value and its length in bytes.
///
/// None if `bytes` ends within the integer, or begins with a byte that does not begin an integer: `fb` is NULL in a row
/// and a file request in a response, `ff` is an error.
#[must_use]
pub fn read(bytes: &[u8]) -> Option<(u64, usize)> {
    let little = |width: usize| {
        let digits = bytes.get(1..=width)?;
        Some((digits.iter().rev().fold(0, |value, &digit| value << 8 | u64::from(digit)), width + 1))
    };
    match *bytes.first()? {
        small @ 0..=250 => Some((u64::from(small), 1)),
        0xfc => little(2),
        0xfd => little(3),
        0xfe => little(8),
        _ => None,
    }
}

/// Appends `value` in its shortest form.
pub fn write(out: &mut Vec<u8>, value: u64) {
    let digits = value.to_le_bytes();
    match value {
        0..=250 => out.push(digits[0]),
        251..=0xffff => out.extend([0xfc, digits[0], digits[1]]),
        0x1_0000..=0xff_ffff => out.extend([0xfd, digits[0], digits[1], digits[2]]),
        _ => {
            out.push(0xfe);
            out.extend(digits);
        }
    }
}
