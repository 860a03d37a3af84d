//! Numbers and texts appended to a buffer, without formatting machinery: the module does this for each statement.

const HEXADECIMAL: &[u8; 16] = b"0123456789abcdef";

pub(crate) fn push_decimal(out: &mut Vec<u8>, mut number: u64) {
    let mut digits = [0; 20];
    let mut start = digits.len();
    loop {
        start -= 1;
        digits[start] = b'0' + (number % 10) as u8;
        number /= 10;
        if number == 0 {
            break;
        }
    }
    out.extend_from_slice(&digits[start..]);
}

pub(crate) fn push_signed(out: &mut Vec<u8>, number: i64) {
    if number < 0 {
        out.push(b'-');
    }
    push_decimal(out, number.unsigned_abs());
}

/// The last `width` decimal digits, with leading zeros.
pub(crate) fn push_digits(out: &mut Vec<u8>, mut number: u32, width: usize) {
    let start = out.len();
    out.resize(start + width, b'0');
    for digit in out[start..].iter_mut().rev() {
        *digit = b'0' + (number % 10) as u8;
        number /= 10;
    }
}

pub(crate) fn push_hexadecimal(out: &mut Vec<u8>, bytes: &[u8]) {
    let start = out.len();
    out.resize(start + 2 * bytes.len(), 0);
    for (digits, byte) in out[start..].chunks_exact_mut(2).zip(bytes) {
        digits[0] = HEXADECIMAL[usize::from(byte >> 4)];
        digits[1] = HEXADECIMAL[usize::from(byte & 15)];
    }
}

/// The bytes that `text` has as hexadecimal digits. None: another length, or other characters.
pub(crate) fn parse_hexadecimal<const N: usize>(text: &str) -> Option<[u8; N]> {
    let digits = text.as_bytes();
    if digits.len() != 2 * N {
        return None;
    }
    let mut bytes = [0; N];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = (hexadecimal_digit(pair[0])? << 4) | hexadecimal_digit(pair[1])?;
    }
    Some(bytes)
}

pub(crate) fn hexadecimal_digit(digit: u8) -> Option<u8> {
    match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        b'A'..=b'F' => Some(digit - b'A' + 10),
        _ => None,
    }
}

/// An unsigned decimal number with nothing before or behind it.
pub(crate) fn parse_decimal(text: &[u8]) -> Option<u64> {
    if text.is_empty() || !text.iter().all(u8::is_ascii_digit) {
        return None;
    }
    str::from_utf8(text).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{any, proptest};

    use super::*;

    proptest! {
        #[test]
        fn decimal_numbers_are_written_as_the_standard_library_writes_them(number: u64, signed: i64) {
            let mut out = Vec::new();
            push_decimal(&mut out, number);
            assert_eq!(out, number.to_string().as_bytes());
            assert_eq!(parse_decimal(&out), Some(number));
            out.clear();
            push_signed(&mut out, signed);
            assert_eq!(out, signed.to_string().as_bytes());
        }

        #[test]
        fn hexadecimal_texts_are_read_back(bytes in any::<[u8; 8]>()) {
            let mut out = Vec::new();
            push_hexadecimal(&mut out, &bytes);
            let text = String::from_utf8(out).expect("ASCII");
            assert_eq!(parse_hexadecimal(&text), Some(bytes));
            assert_eq!(parse_hexadecimal::<8>(&text[1..]), None);
        }
    }

    #[test]
    fn digits_are_padded() {
        let mut out = Vec::new();
        push_digits(&mut out, 7, 3);
        push_digits(&mut out, 2026, 4);
        assert_eq!(out, b"0072026");
    }

    #[test]
    fn numbers_that_are_no_decimal_number_are_refused() {
        for text in ["", "-1", "+1", " 1", "1 ", "0x1", "18446744073709551616"] {
            assert_eq!(parse_decimal(text.as_bytes()), None, "{text:?}");
        }
    }
}
