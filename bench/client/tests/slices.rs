//! Slices against servers that do right and wrong.

mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::SocketAddr;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use common::{Fault, start};
use serde_json::{Value, json};

/// The program at work, ended with the test.
struct Slices {
    child: Child,
    requests: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Slices {
    fn start(targets: &[SocketAddr], options: &str) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tidevoy-load"));
        command.arg("slices").args(options.split_whitespace());
        for target in targets {
            command.args(["--target", &target.to_string()]);
        }
        let pipes = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = pipes.spawn().expect("it runs");
        let (requests, answers) = (child.stdin.take(), BufReader::new(child.stdout.take().expect("its output")));
        Self { child, requests, answers }
    }

    /// The same with all logged in.
    fn ready(targets: &[SocketAddr], options: &str) -> Self {
        let mut slices = Self::start(targets, options);
        assert_eq!(slices.line(), json!({"ready": true}));
        slices
    }

    fn line(&mut self) -> Value {
        let mut line = String::new();
        self.answers.read_line(&mut line).expect("a line");
        serde_json::from_str(&line).expect("JSON")
    }

    fn send(&mut self, request: &str) {
        writeln!(self.requests.as_mut().expect("its input"), "{request}").expect("it listens");
    }

    fn run(&mut self, request: &Value) -> Value {
        self.send(&request.to_string());
        self.line()
    }

    /// Its exit code, and what it complains of.
    fn end(mut self) -> (Option<i32>, String) {
        drop(self.requests.take());
        let mut message = String::new();
        self.child.stderr.take().expect("its errors").read_to_string(&mut message).expect("text");
        (self.child.wait().expect("its end").code(), message)
    }
}

impl Drop for Slices {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn count(found: &Value, key: &str) -> usize {
    found[key].as_array().expect(key).len()
}

#[test]
fn all_ask_at_full_speed_and_the_end_of_input_is_the_end() {
    let mut slices = Slices::ready(&[start(Fault::None), start(Fault::None)], "--connections 4");
    for target in [0, 1, 0] {
        let found = slices.run(&json!({"target": target, "seconds": 0.1, "rate": null, "new_connections": null}));
        assert!(count(&found, "latencies_us") > 10, "{found}");
        assert!(found["latencies_us"].as_array().expect("numbers").iter().all(|each| each.as_f64() > Some(0.0)));
        assert!((0.01..5.0).contains(&found["seconds"].as_f64().expect("seconds")), "{found}");
        assert_eq!((count(&found, "new_connections_us"), &found["errors"]), (0, &json!(0)), "{found}");
    }
    assert_eq!(slices.end(), (Some(0), String::new()));
}

#[test]
fn statements_and_connections_keep_to_their_rates() {
    let mut slices = Slices::ready(&[start(Fault::None)], "--connections 4 --statement do{} --max-number 9");
    for (rate, new_connections) in [(500.0, 0.0), (500.0, 100.0), (0.0, 100.0), (0.0, 0.0)] {
        let request = json!({"target": 0, "seconds": 0.2, "rate": rate, "new_connections": new_connections});
        let found = slices.run(&request);
        let expected = ((rate * 0.2) as usize, (new_connections * 0.2) as usize);
        assert_eq!((count(&found, "latencies_us"), count(&found, "new_connections_us")), expected, "{found}");
        assert_eq!(found["errors"], 0, "{found}");
    }
}

#[test]
fn without_open_connections_there_are_new_ones() {
    let mut slices = Slices::ready(&[start(Fault::None)], "--connections 0");
    let found = slices.run(&json!({"target": 0, "seconds": 0.2, "rate": null, "new_connections": 100}));
    assert_eq!((count(&found, "latencies_us"), count(&found, "new_connections_us")), (0, 20), "{found}");
    slices.send(r#"{"target": 0, "seconds": 0.2, "rate": 10}"#);
    let (code, message) = slices.end();
    assert!(code == Some(1) && message.contains("rate must be 0 without --connections"), "{message}");
}

#[test]
fn refusals_are_errors() {
    let mut slices = Slices::ready(&[start(Fault::Refuses)], "--connections 2");
    let found = slices.run(&json!({"target": 0, "seconds": 0.1, "rate": 100, "new_connections": 100}));
    assert_eq!((count(&found, "latencies_us"), count(&found, "new_connections_us")), (0, 0), "{found}");
    assert_eq!(found["errors_by_kind"], json!({"error 1146": 20}));
    assert!(found["details"][0].as_str().expect("a text").contains("No such table"), "{found}");
}

#[test]
fn a_lost_connection_is_one_error() {
    let mut slices = Slices::ready(&[start(Fault::Drops)], "--connections 2");
    let found = slices.run(&json!({"target": 0, "seconds": 0.1}));
    assert_eq!(found["errors_by_kind"], json!({"closed": 1}), "{found}");
    assert!(count(&found, "latencies_us") > 10, "{found}");
    let found = slices.run(&json!({"target": 0, "seconds": 0.1}));
    assert_eq!(found["errors"], 0, "{found}");
}

#[test]
fn where_no_connection_is_left_nothing_is_asked() {
    let mut slices = Slices::ready(&[start(Fault::Drops)], "--connections 1");
    let found = slices.run(&json!({"target": 0, "seconds": 0.1, "rate": 100}));
    assert_eq!(found["errors_by_kind"], json!({"closed": 1, "unsent": 9}), "{found}");
    let found = slices.run(&json!({"target": 0, "seconds": 0.01}));
    assert_eq!(found["errors_by_kind"], json!({"unsent": 1}), "{found}");
}

#[test]
fn what_nobody_asked_for_is_told() {
    let mut slices = Slices::ready(&[start(Fault::Talks)], "--connections 1");
    let begun = Instant::now();
    let found = slices.run(&json!({"target": 0, "seconds": 0.1}));
    assert_eq!(found["errors_by_kind"], json!({"protocol": 1}), "{found}");
    assert!(found["details"][0].as_str().expect("a text").contains("Server shutdown"), "{found}");
    assert!(begun.elapsed() < Duration::from_secs(5), "it waits for an answer that has come");
}

#[test]
fn answers_that_do_not_come_are_slow() {
    let mut slices = Slices::ready(&[start(Fault::Silent)], "--connections 2 --patience 0.2");
    let found = slices.run(&json!({"target": 0, "seconds": 0.1, "rate": 100, "new_connections": 100}));
    assert_eq!(found["errors_by_kind"], json!({"slow": 20}), "{found}");
    assert_eq!(found["seconds"], 0.0);
}

#[test]
fn all_must_log_in() {
    let (code, message) = Slices::start(&[start(Fault::None), start(Fault::Full)], "--connections 2").end();
    assert!(message.contains("0 of 2 connections") && message.contains("error 1040"), "{message}");
    assert_eq!((code, message.lines().count()), (Some(1), 1));
    let mut slices = Slices::ready(&[start(Fault::Full)], "--connections 0");
    let found = slices.run(&json!({"target": 0, "seconds": 0.1, "new_connections": 100}));
    assert_eq!((count(&found, "new_connections_us"), &found["errors_by_kind"]), (0, &json!({"error 1040": 10})));
}

#[test]
fn invalid_request_is_reported() {
    for request in ["nothing", r#"{"target": 1, "seconds": 1}"#] {
        let mut slices = Slices::ready(&[start(Fault::None)], "--connections 1");
        slices.send(request);
        let (code, message) = slices.end();
        assert!(message.contains("is invalid"), "{message}");
        assert_eq!((code, message.lines().count()), (Some(1), 1));
    }
}
