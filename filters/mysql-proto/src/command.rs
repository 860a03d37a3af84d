//! Commands: the first byte of a client's message after the login.

/// A command by its first byte. It determines which counter is incremented, and the shape of the
/// response.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Command {
    Quit = 0x01,
    InitDb = 0x02,
    Query = 0x03,
    FieldList = 0x04,
    Refresh = 0x07,
    Shutdown = 0x08,
    Statistics = 0x09,
    ProcessInfo = 0x0a,
    ProcessKill = 0x0c,
    Debug = 0x0d,
    Ping = 0x0e,
    ChangeUser = 0x11,
    BinlogDump = 0x12,
    TableDump = 0x13,
    RegisterSlave = 0x15,
    Prepare = 0x16,
    Execute = 0x17,
    SendLongData = 0x18,
    CloseStatement = 0x19,
    ResetStatement = 0x1a,
    SetOption = 0x1b,
    Fetch = 0x1c,
    BinlogDumpGtid = 0x1e,
    ResetConnection = 0x1f,
    /// MariaDB: executes one statement several times.
    BulkExecute = 0xfa,
    /// Any other byte; a server answers with an error.
    Other = 0xff,
}

impl Command {
    /// Whether the command names a prepared statement, by an id in 4 bytes behind the command.
    #[must_use]
    pub const fn names_statement(self) -> bool {
        matches!(
            self,
            Self::Execute
                | Self::BulkExecute
                | Self::SendLongData
                | Self::CloseStatement
                | Self::ResetStatement
                | Self::Fetch
        )
    }
}

impl From<u8> for Command {
    fn from(byte: u8) -> Self {
        match byte {
            0x01 => Self::Quit,
            0x02 => Self::InitDb,
            0x03 => Self::Query,
            0x04 => Self::FieldList,
            0x07 => Self::Refresh,
            0x08 => Self::Shutdown,
            0x09 => Self::Statistics,
            0x0a => Self::ProcessInfo,
            0x0c => Self::ProcessKill,
            0x0d => Self::Debug,
            0x0e => Self::Ping,
            0x11 => Self::ChangeUser,
            0x12 => Self::BinlogDump,
            0x13 => Self::TableDump,
            0x15 => Self::RegisterSlave,
            0x16 => Self::Prepare,
            0x17 => Self::Execute,
            0x18 => Self::SendLongData,
            0x19 => Self::CloseStatement,
            0x1a => Self::ResetStatement,
            0x1b => Self::SetOption,
            0x1c => Self::Fetch,
            0x1e => Self::BinlogDumpGtid,
            0x1f => Self::ResetConnection,
            0xfa => Self::BulkExecute,
            _ => Self::Other,
        }
    }
}
