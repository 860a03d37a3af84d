//! Slices of load on one of several targets at a time, as they are ordered on standard input.
//!
//! All connections are open from beginning to end, so that a slice pays for nothing but its statements, and
//! what is compared differs in nothing but the target.

use std::io::{self, BufRead, Write};
use std::time::Duration;

use serde_json::{Value, json};

use crate::failure::Failure;
use crate::options::Slices;
use crate::order::Order;
use crate::record::Record;
use crate::slice::Site;
use crate::statements::Statements;

pub(crate) fn run(options: &Slices) -> Result<(), Failure> {
    let connections = options.connections as usize;
    let mut sites = Vec::with_capacity(options.targets.len());
    for place in &options.targets {
        sites.push(Site::open(&place.server(&options.account), connections)?);
    }
    let mut statements = Statements::new(&options.statement, options.numbers);
    let mut record = Record::new();
    let patience = Duration::from_secs_f64(options.patience);
    tell(&json!({"ready": true}))?;
    let (mut input, mut line) = (io::stdin().lock(), Vec::new());
    loop {
        line.clear();
        let length = input
            .read_until(b'\n', &mut line)
            .map_err(|error| Failure::Setting(format!("standard input cannot be read: {error}")))?;
        if length == 0 {
            return Ok(());
        }
        let order = Order::read(&line, sites.len(), connections)?;
        record.clear();
        sites[order.target].work(&order, patience, &mut statements, &mut record)?;
        tell(&record.tell())?;
    }
}

fn tell(found: &Value) -> Result<(), Failure> {
    let mut output = io::stdout().lock();
    writeln!(output, "{found}")
        .and_then(|()| output.flush())
        .map_err(|error| Failure::Setting(format!("standard output cannot be written: {error}")))
}
