//! Records for tests.

use mysql_proto::command::Command;
use traffic_files::record::Record;

/// A successful command of session 1, at time 1.
pub(crate) fn record(command: Command, payload: &[u8]) -> Record {
    Record {
        time_ns: 1,
        connection: 1,
        command,
        is_success: true,
        prepared_id: None,
        prepared_text: None,
        payload: payload.to_vec(),
    }
}
