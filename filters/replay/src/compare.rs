//! Compares the results of two captures or replays.

use std::fs;

use traffic_files::compare::compare_directories;

use crate::options::CompareOptions;

/// Writes the comparison as JSON to a file, or to standard output.
pub(crate) fn run(options: &CompareOptions) -> Result<(), String> {
    let comparison = compare_directories(std::slice::from_ref(&options.old), std::slice::from_ref(&options.new));
    let comparison = comparison.map_err(|error| error.to_string())?;
    let json = serde_json::to_string(&comparison).map_err(|error| error.to_string())?;
    match &options.json {
        Some(path) => fs::write(path, json).map_err(|error| format!("cannot write {}: {error}", path.display())),
        None => {
            println!("{json}");
            Ok(())
        }
    }
}
