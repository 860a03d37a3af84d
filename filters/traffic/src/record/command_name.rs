//! The names that TiProxy has for commands (pingcap/tiproxy, `pkg/proxy/net/command.go`).

use mysql_proto::command::Command;

use crate::text::hexadecimal_digit;

/// Before the byte in hexadecimal, if the command has no name.
const UNNAMED: &[u8] = b"Not a command: ";

const NAMES: [(Command, &str); 24] = [
    (Command::Quit, "Quit"),
    (Command::InitDb, "InitDB"),
    (Command::Query, "Query"),
    (Command::FieldList, "FieldList"),
    (Command::Refresh, "Refresh"),
    (Command::Shutdown, "(DEPRECATED)Shutdown"),
    (Command::Statistics, "Statistics"),
    (Command::ProcessInfo, "ProcessInfo"),
    (Command::ProcessKill, "ProcessKill"),
    (Command::Debug, "Debug"),
    (Command::Ping, "Ping"),
    (Command::ChangeUser, "ChangeUser"),
    (Command::BinlogDump, "BinlogDump"),
    (Command::TableDump, "TableDump"),
    (Command::RegisterSlave, "RegisterSlave"),
    (Command::Prepare, "StmtPrepare"),
    (Command::Execute, "StmtExecute"),
    (Command::SendLongData, "StmtSendLongData"),
    (Command::CloseStatement, "StmtClose"),
    (Command::ResetStatement, "StmtReset"),
    (Command::SetOption, "SetOption"),
    (Command::Fetch, "StmtFetch"),
    (Command::BinlogDumpGtid, "BinlogDumpGtid"),
    (Command::ResetConnection, "ResetConnect"),
];

pub(super) fn of(command: Command) -> &'static str {
    match command {
        Command::Execute => "StmtExecute",
        Command::BulkExecute => "Not a command: fa",
        Command::Other => "Not a command: ff",
        _ => NAMES.iter().find(|(named, _)| *named == command).map_or("Not a command: ff", |(_, name)| name),
    }
}

/// The command with this name. `Other`: a name that is not known, or of a command that no client may send.
pub(super) fn parse(name: &[u8]) -> Command {
    if let Some((command, _)) = NAMES.iter().find(|(_, known)| known.as_bytes() == name) {
        return *command;
    }
    match name.strip_prefix(UNNAMED) {
        Some([high, low]) => match (hexadecimal_digit(*high), hexadecimal_digit(*low)) {
            (Some(high), Some(low)) => Command::from((high << 4) | low),
            _ => Command::Other,
        },
        _ => Command::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_command_has_a_name_that_is_read_back() {
        for byte in 0..=u8::MAX {
            let command = Command::from(byte);
            assert_eq!(parse(of(command).as_bytes()), command, "{byte:#x}");
        }
    }

    #[test]
    fn names_without_a_command_are_other_commands() {
        for name in ["Sleep", "query", "", "Not a command: ", "Not a command: 1", "Not a command: gg"] {
            assert_eq!(parse(name.as_bytes()), Command::Other, "{name}");
        }
    }
}
