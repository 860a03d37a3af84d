//! Runs slices of load, each on one of several targets, as requested on standard input.
//!
//! All connections stay open during the whole run, so a slice costs only its statements, and compared slices differ
//! only in their targets.

use std::io::{self, BufRead, Write};
use std::time::Duration;

use serde_json::{Value, json};

use crate::failure::Failure;
use crate::options::Slices;
use crate::record::Record;
use crate::slice::Site;
use crate::slice_request::SliceRequest;
use crate::statements::Statements;

pub(crate) fn run(options: &Slices) -> Result<(), Failure> {
    let connections = options.connections as usize;
    let mut sites = Vec::with_capacity(options.targets.len());
    for target in &options.targets {
        sites.push(Site::open(&target.server(&options.account), connections)?);
    }
    let mut statements = Statements::new(&options.statement, options.max_number);
    let mut record = Record::new();
    let patience = Duration::from_secs_f64(options.patience);
    print(&json!({"ready": true}))?;
    let (mut input, mut line) = (io::stdin().lock(), Vec::new());
    loop {
        line.clear();
        let length = input
            .read_until(b'\n', &mut line)
            .map_err(|error| Failure::Setting(format!("standard input cannot be read: {error}")))?;
        if length == 0 {
            return Ok(());
        }
        let request = SliceRequest::read(&line, sites.len(), connections)?;
        record.clear();
        sites[request.target].run(&request, patience, &mut statements, &mut record)?;
        print(&record.to_json())?;
    }
}

fn print(result: &Value) -> Result<(), Failure> {
    let mut output = io::stdout().lock();
    writeln!(output, "{result}")
        .and_then(|()| output.flush())
        .map_err(|error| Failure::Setting(format!("standard output cannot be written: {error}")))
}
