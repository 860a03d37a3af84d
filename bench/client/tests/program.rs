//! The program against servers that do right and wrong: what is wrong must be found.

mod common;

use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::process::{Command, Output, Stdio};

use common::{Fault, start};
use serde_json::{Value, json};

fn command(arguments: &str, address: Option<SocketAddr>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidevoy-load"));
    command.args(arguments.split_whitespace());
    if let Some(address) = address {
        command.args(["--address", &address.to_string()]);
    }
    command
}

fn run(arguments: &str, fault: Fault) -> Output {
    command(arguments, Some(start(fault))).output().expect("it runs")
}

/// What it prints when all goes well, whatever it has found.
fn found(arguments: &str, fault: Fault) -> Value {
    let output = run(arguments, fault);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

/// The one sentence that it fails with.
fn complaint(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(1));
    assert!(output.stdout.is_empty());
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(told.lines().count(), 1, "{told}");
    told
}

fn details(found: &Value) -> String {
    found["details"].to_string()
}

#[test]
fn idle_tells_who_is_still_alive() {
    for (fault, alive) in [(Fault::None, 5), (Fault::Drops, 4)] {
        let mut child = command("idle --connections 5 --ramp 1000", Some(start(fault)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("it runs");
        let mut output = BufReader::new(child.stdout.take().expect("its output"));
        let mut line = String::new();
        output.read_line(&mut line).expect("a line");
        assert_eq!(serde_json::from_str::<Value>(&line).expect("JSON"), json!({"connected": 5}));
        drop(child.stdin.take());
        line.clear();
        output.read_to_string(&mut line).expect("the rest");
        let found: Value = serde_json::from_str(&line).expect("JSON");
        assert_eq!((&found["alive"], &found["errors"]), (&json!(alive), &json!(5 - alive)), "{found}");
        assert!(child.wait().expect("its end").success());
    }
}

#[test]
fn nonce_finds_nothing_where_nothing_is_wrong() {
    let found = found("nonce --sessions 300 --parallel 8 --kill 0.5", Fault::None);
    assert_eq!((&found["sessions"], &found["errors"]), (&json!(300), &json!(0)), "{found}");
    assert!(found["cut"].as_u64() > Some(100) && found["answers"].as_u64() > Some(300), "{found}");
}

#[test]
fn nonce_finds_foreign_bytes() {
    let found = found("nonce --sessions 200 --parallel 8 --kill 0", Fault::Foreign);
    assert!(found["errors_by_kind"]["content"].as_u64() > Some(20), "{found}");
    assert!(details(&found).contains("at byte") && details(&found).contains("ffffffff"), "{found}");
}

#[test]
fn nonce_finds_bytes_behind_an_answer_and_rows_that_lack() {
    let talks = found("nonce --sessions 20 --parallel 4 --kill 0", Fault::Talks);
    assert!(details(&talks).contains("nobody asked for"), "{talks}");
    let loses = found("nonce --sessions 20 --parallel 4 --kill 0", Fault::Loses);
    assert!(details(&loses).contains("rows are due"), "{loses}");
}

#[test]
fn gaps_finds_stalls() {
    let good = found("gaps --statements 2000 --connections 4", Fault::None);
    assert_eq!((&good["stalls"], &good["errors"]), (&json!(0), &json!(0)), "{good}");
    assert!(good["statements"].as_u64() >= Some(2000), "{good}");
    let silent = found("gaps --statements 2 --connections 2", Fault::Silent);
    assert!(silent["stalls"].as_u64() >= Some(1), "{silent}");
    assert!(details(&silent).contains("statement 1, ") && details(&silent).contains("in pieces of"), "{silent}");
}

#[test]
fn gaps_finds_refusals() {
    let refused = found("gaps --statements 20 --connections 1", Fault::Refuses);
    assert_eq!(refused["statements"], 0, "{refused}");
    assert!(refused["errors_by_kind"]["error 1146"].as_u64() >= Some(10), "{refused}");
}

#[test]
fn slow_finds_rows_that_lack() {
    let arguments = "slow --connections 2 --bytes 1000000 --pause 0.05 --dribble 0.05";
    let good = found(arguments, Fault::None);
    assert_eq!((&good["done"], &good["rows"], &good["errors"]), (&json!(2), &json!(977), &json!(0)), "{good}");
    assert_eq!(good["bytes"], 2 * 977 * 1027);
    let loses = found(arguments, Fault::Loses);
    assert_eq!((&loses["done"], &loses["errors"]), (&json!(0), &json!(2)), "{loses}");
}

#[test]
fn a_server_that_is_not_there_is_told() {
    let told =
        complaint(&command("nonce --address nowhere --sessions 1 --parallel 1", None).output().expect("it runs"));
    assert!(told.contains("give HOST:PORT"), "{told}");
    let told = complaint(&command("idle --address 127.0.0.1:1 --connections 1", None).output().expect("it runs"));
    assert!(told.contains("0 of 1 connections to 127.0.0.1:1") && told.contains("refused"), "{told}");
}

#[test]
fn usage_has_an_exit_code_of_its_own() {
    for arguments in ["", "nothing", "gaps --address 127.0.0.1:1 --statements 1 --connections 0", "idle --what"] {
        let output = command(arguments, None).output().expect("it runs");
        assert_eq!(output.status.code(), Some(2), "{arguments}");
    }
}
