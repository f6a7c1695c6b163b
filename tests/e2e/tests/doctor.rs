//! `tandem doctor` before real workers: nothing is wrong with a good fleet, and each fault is told with what to do.

use std::process::{Command, Output};

use serde_json::Value;
use tandem_e2e::{Fleet, FleetOptions, Role, binary};

/// The exit status, and what was printed as JSON.
async fn doctor(args: Vec<String>) -> (i32, Value) {
    let output = run(args, true).await;
    let text = String::from_utf8_lossy(&output.stdout);
    let report = serde_json::from_str(&text);
    let report = report.unwrap_or_else(|e| panic!("{e}: {text}{}", String::from_utf8_lossy(&output.stderr)));
    (output.status.code().expect("doctor exits"), report)
}

async fn run(args: Vec<String>, json: bool) -> Output {
    let mut command = Command::new(binary::tandem());
    command.arg("doctor").args(json.then_some("--json")).args(args);
    let run = tokio::task::spawn_blocking(move || command.output());
    run.await.expect("no panic").expect("doctor starts")
}

/// The pair in the gateway's words, with this bootstrap port.
fn pair(fleet: &Fleet, bootstrap_port: u16) -> Vec<String> {
    let url = |role| fleet.workers[fleet.place(role, 0)].url();
    ["--prefill".into(), url(Role::Prefill), bootstrap_port.to_string(), "--decode".into(), url(Role::Decode)].into()
}

fn bootstrap_port(fleet: &Fleet) -> u16 {
    fleet.workers[fleet.place(Role::Prefill, 0)].bootstrap_port
}

/// What was found, as one text for each finding.
fn found(report: &Value) -> Vec<String> {
    report["findings"].as_array().expect("findings").iter().map(ToString::to_string).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn doctor_finds_nothing_wrong_with_a_good_fleet() {
    let fleet = Fleet::start("doctor_well", FleetOptions::pd(1, 2)).await;
    for args in [vec!["--gateway".into(), fleet.url()], pair(&fleet, bootstrap_port(&fleet))] {
        let pairs = if args[0] == "--gateway" { 2 } else { 1 };
        let (status, report) = doctor(args).await;
        assert_eq!((status, &report["ok"], found(&report).len()), (0, &Value::Bool(true), 0), "{report}");
        let lines = report["pairs"].as_array().expect("pairs");
        assert!(lines.len() == pairs && lines.iter().all(|pair| pair["checked"] == "by_prompt"), "{report}");
    }
    let text = run(vec!["--gateway".into(), fleet.url()], false).await;
    let text = String::from_utf8_lossy(&text.stdout).into_owned();
    assert!(text.contains("a prompt went through") && text.contains("Nothing is wrong."), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn doctor_tells_what_keeps_a_pair_from_serving() {
    let options = FleetOptions::pd(1, 1).without_gateway().decode_args("--page-size 32").prefill_args("--page-size 16");
    let mut fleet = Fleet::start("doctor_faults", options).await;
    let port = bootstrap_port(&fleet);

    let (status, report) = doctor(pair(&fleet, port)).await;
    let findings = found(&report);
    assert!(status == 1 && findings.iter().any(|f| f.contains("page_size") && f.contains("--page-size")), "{report}");
    assert_eq!(report["pairs"][0]["checked"], "by_prompt", "{report}");

    let [p, d] = [Role::Prefill, Role::Decode].map(|role| fleet.workers[fleet.place(role, 0)].url());
    let (status, report) = doctor(["--prefill", &d, "8998", "--decode", &p].map(str::to_owned).into()).await;
    let roles = found(&report).iter().filter(|f| f.contains("runs with --disaggregation-mode")).count();
    assert_eq!((status, roles), (1, 2), "{report}");

    fleet.first(Role::Prefill).kill();
    let (status, report) = doctor(pair(&fleet, port)).await;
    let findings = found(&report);
    assert!(status == 1 && findings.iter().any(|f| f.contains("cannot be reached")), "{report}");
}

#[tokio::test(flavor = "multi_thread")]
async fn doctor_tells_a_wrong_bootstrap_port() {
    let fleet = Fleet::start("doctor_port", FleetOptions::pd(1, 1).without_gateway()).await;
    let wrong = tandem_e2e::net::free_port();
    let mut args = pair(&fleet, wrong);
    args.extend(["--answer-timeout-secs".into(), "5".into()]);
    let (status, report) = doctor(args).await;
    let findings = found(&report);
    assert_eq!(status, 1, "{report}");
    assert!(findings.iter().any(|f| f.contains(&format!("set to {wrong}"))), "{report}");
    assert!(
        findings.iter().any(|f| f.contains("did not get through") && f.contains("not answer here either")),
        "{report}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn doctor_says_when_there_is_nobody_to_ask() {
    let nobody = format!("http://{}:{}", tandem_e2e::net::host(), tandem_e2e::net::free_port());
    let output = run(vec!["--gateway".into(), nobody], false).await;
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && text.contains("check --gateway"), "{text}");
}
