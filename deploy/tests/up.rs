//! `tandem up` as a person meets it when something is wrong: one clear message, no process left, no success.

use std::process::{Command, Output};

fn tandem(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tandem")).args(arguments).output().expect("the binary runs")
}

fn refused(arguments: &[&str]) -> String {
    let output = tandem(arguments);
    assert!(!output.status.success(), "{arguments:?} must fail");
    let message = String::from_utf8(output.stderr).expect("UTF-8");
    assert!(!message.contains("panicked"), "{message}");
    message
}

#[test]
fn shapes_that_answer_nobody_are_refused_with_one_that_works() {
    assert!(refused(&["up", "0p0d"]).contains("--plain N"));
    assert!(refused(&["up", "1p0d"]).contains("1p1d"));
    assert!(refused(&["up", "0p3d"]).contains("1p3d"));
    assert!(refused(&["up", "1p1d", "--plain", "2"]).contains("0p0d --plain 2"));
    assert!(refused(&["up", "one-of-each"]).contains("1p1d"));
}

#[test]
fn a_taken_port_is_told_before_anything_starts() {
    let holder = std::net::TcpListener::bind("127.0.0.1:0").expect("bind");
    let port = holder.local_addr().expect("address").port().to_string();
    let message = refused(&["up", "1p1d", "--port", &port]);
    assert!(message.contains(&port) && message.contains("--port"), "{message}");
    assert!(!message.contains("prefill-0"), "{message}");
}

#[test]
fn a_ready_file_that_cannot_be_written_is_told_before_anything_starts() {
    let message = refused(&["up", "1p1d", "--port", "0", "--ready-file", "/nonexistent/ready.json"]);
    assert!(message.contains("/nonexistent/ready.json") && message.contains("--ready-file"), "{message}");
    assert!(!message.contains("prefill-0"), "{message}");
}

#[test]
fn a_child_that_dies_is_named_with_its_last_words_and_the_ready_file_never_appears() {
    let folder = tempfile::tempdir().expect("folder");
    let ready = folder.path().join("ready.json");
    let model = folder.path().join("no-such-model");
    let paths = [&ready, &model].map(|path| path.to_str().expect("UTF-8"));
    let message =
        refused(&["up", "0p0d", "--plain", "1", "--port", "0", "--ready-file", paths[0], "--model-path", paths[1]]);
    assert!(message.contains("plain-0 (pid "), "{message}");
    assert!(message.contains("exited with status"), "{message}");
    assert!(!ready.exists());
}
