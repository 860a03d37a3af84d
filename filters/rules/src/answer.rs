//! What a client gets instead of the result of its statement.

/// An error packet's content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    pub code: u16,
    pub state: [u8; 5],
    pub message: String,
}

/// "The used command is not allowed": it is not the fault of the connection or of the user's password. So connection
/// pools keep the connection, and applications do not retry. Other proxies use it for blocked statements, too.
const NOT_ALLOWED: u16 = 1148;
/// "User has exceeded the resource": the error for Tidevoy's other limits.
const LIMIT_REACHED: u16 = 1226;

impl Answer {
    pub(crate) fn blocked(rule: &str, message: Option<&str>, code: Option<u16>) -> Self {
        let code = code.unwrap_or(NOT_ALLOWED);
        let message = message.map_or_else(
            || format!("Tidevoy: the rule '{rule}' blocks this statement (operator: tidevoy rules)"),
            Into::into,
        );
        Self { code, state: state(code), message }
    }

    pub(crate) fn unknown_text(rule: &str) -> Self {
        let message = format!(
            "Tidevoy: while the rule '{rule}' blocks statements, PREPARE needs the text itself instead of a variable \
             (operator: tidevoy rules)"
        );
        Self { message, ..Self::blocked(rule, None, None) }
    }

    pub(crate) fn limited(rule: &str, limit: &str) -> Self {
        let message =
            format!("Tidevoy: the rule '{rule}' allows {limit} on each Envoy; try again (operator: tidevoy rules)");
        Self { code: LIMIT_REACHED, state: state(LIMIT_REACHED), message }
    }
}

/// The SQLSTATE that MySQL sends with an error code (<https://dev.mysql.com/doc/mysql-errors/8.0/en/>).
fn state(code: u16) -> [u8; 5] {
    *match code {
        1044 | 1064 | 1142 | 1143 | 1148 | 1203 | 1226 | 1227 | 1235 | 1370 => b"42000",
        1045 => b"28000",
        1146 => b"42S02",
        1213 => b"40001",
        1317 => b"70100",
        1792 => b"25006",
        _ => b"HY000",
    }
}
