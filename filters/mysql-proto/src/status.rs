//! Server status bits, as OK and EOF packets carry them.

pub const IN_TRANSACTION: u16 = 0x0001;
pub const AUTOCOMMIT: u16 = 0x0002;
pub const MORE_RESULTS: u16 = 0x0008;
pub const CURSOR_EXISTS: u16 = 0x0040;
pub const LAST_ROW_SENT: u16 = 0x0080;
