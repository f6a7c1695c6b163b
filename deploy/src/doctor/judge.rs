//! From what workers said to findings: what is wrong, whose fault it is, what to do. *Pure.*

use serde_json::Value;
use tandem_gateway::Role;

use super::ask::{Trial, Worker};
use super::report::{Checked, Finding, Level, PairLine, Report, WorkerLine};

/// A clock that is off by more than this many seconds is told: logs of two machines cannot be read side by side then.
const CLOCK_OFF_SECS: i64 = 5;
/// Pairs that are tried at most.
pub const PAIRS_MAX: usize = 256;
/// Fields of `/server_info` that two workers of a pair must have in common, and who sets each. The handshake compares
/// more; what these leave out, the prompt through the pair shows.
const LAYOUT: [(&str, &str); 3] = [
    ("fingerprint", "the model's files: give both workers the same --model-path"),
    ("page_size", "--page-size: give both workers the same"),
    ("cpu_math", "--cpu-math: give both workers the same"),
];

/// The pairs that the gateway may make: each prefill with each decode worker of the same model.
pub fn pairs(workers: &[Worker]) -> Vec<(usize, usize)> {
    let of = |role| (0..workers.len()).filter(move |&at| workers[at].target.role == role);
    let same = |p: usize, d: usize| match (&workers[p].model, &workers[d].model) {
        (Some(p), Some(d)) => p == d,
        _ => true,
    };
    let all = of(Role::Prefill).flat_map(|p| of(Role::Decode).map(move |d| (p, d)));
    all.filter(|&(p, d)| same(p, d)).take(PAIRS_MAX).collect()
}

/// `trials`: one for each pair, or empty where none was to be made.
pub fn judge(
    workers: Vec<Worker>,
    pairs: Vec<(usize, usize)>,
    trials: Vec<Option<Trial>>,
    own_version: &str,
) -> Report {
    let mut findings = Findings::default();
    findings.of_fleet(&workers, &pairs, own_version);
    let of_workers = workers.iter().map(|worker| {
        let before = findings.errors();
        findings.of_worker(worker);
        let (url, worker_type) = (worker.target.url.clone(), worker.target.role.worker_type());
        WorkerLine { url, worker_type, ok: findings.errors() == before }
    });
    let lines = of_workers.collect();
    let of_pairs = pairs.iter().enumerate().map(|(at, &(p, d))| {
        let before = findings.errors();
        let trial = trials.get(at).and_then(Option::as_ref);
        findings.of_pair(&workers[p], &workers[d], trial);
        PairLine {
            prefill: workers[p].target.url.clone(),
            decode: workers[d].target.url.clone(),
            ok: findings.errors() == before,
            checked: if trial.is_some() { Checked::ByPrompt } else { Checked::FromHere },
            took_ms: trial.and_then(|trial| trial.outcome.as_ref().ok().copied()),
        }
    });
    let pair_lines = of_pairs.collect();
    let mut report = Report { ok: false, workers: lines, pairs: pair_lines, findings: findings.0 };
    report.findings.sort_by_key(|finding| finding.level);
    report.ok = report.is_well();
    report
}

#[derive(Default)]
struct Findings(Vec<Finding>);

impl Findings {
    fn errors(&self) -> usize {
        self.0.iter().filter(|finding| finding.level == Level::Error).count()
    }

    fn add(&mut self, level: Level, subject: &str, [what, fault, todo]: [String; 3]) {
        self.0.push(Finding { level, subject: subject.to_owned(), what, fault, todo });
    }

    fn of_fleet(&mut self, workers: &[Worker], pairs: &[(usize, usize)], own_version: &str) {
        let has = |role| workers.iter().any(|worker| worker.target.role == role);
        let settings = "the gateway's settings, or the source that they name".to_owned();
        match (has(Role::Prefill), has(Role::Decode), has(Role::Plain)) {
            (false, false, false) => {
                let todo = "name workers by flags, a file, DNS or Kubernetes, and look at that source".into();
                self.add(Level::Error, "the fleet", ["there is no worker".into(), settings, todo]);
            }
            (true, false, _) | (false, true, _) => {
                let (there, missing) = if has(Role::Prefill) { ("prefill", "decode") } else { ("decode", "prefill") };
                let what = format!("there are {there} workers, but no {missing} worker: no pair can be made");
                self.add(Level::Error, "the fleet", [what, settings, format!("add a {missing} worker")]);
            }
            (true, true, _) if pairs.is_empty() => {
                let what = "no prefill worker serves the model of a decode worker".to_owned();
                let todo = "give both the same --served-model-name".to_owned();
                self.add(Level::Error, "the fleet", [what, "whoever started the workers".into(), todo]);
            }
            _ => {}
        }
        if pairs.len() == PAIRS_MAX {
            let what = format!("only the first {PAIRS_MAX} pairs were looked at");
            let todo = "look at parts of the fleet by flags".to_owned();
            self.add(Level::Warning, "the fleet", [what, "this program's limit".into(), todo]);
        }
        self.of_versions(workers, own_version);
    }

    fn of_versions(&mut self, workers: &[Worker], own: &str) {
        // Only ours have numerics; the versions of other engines mean nothing beside ours.
        for worker in workers.iter().filter(|worker| worker.info["numerics"].is_string()) {
            let Some(theirs) = worker.info["version"].as_str().filter(|theirs| *theirs != own) else { continue };
            let what = format!("it is of version {theirs}, this program of {own}");
            let todo =
                "bring the fleet to one version; prefill and decode of two versions may refuse each other".into();
            self.add(Level::Warning, &worker.target.url, [what, "an update that is not complete".into(), todo]);
        }
    }

    fn of_worker(&mut self, worker: &Worker) {
        let url = &worker.target.url;
        let health = match &worker.health {
            Ok(health) => health,
            Err(why) => {
                let fault = "the worker, or the network between here and it".to_owned();
                let todo = "start the worker, and check its address, port and firewall".to_owned();
                return self.add(Level::Error, url, [format!("it cannot be reached: {why}"), fault, todo]);
            }
        };
        let unwell = [("/health", Some(health)), ("/ready", worker.ready.as_ref())];
        let unwell = unwell.into_iter().filter_map(|(path, answer)| Some((path, answer?)));
        if let Some((path, answer)) = unwell.into_iter().find(|(_, answer)| answer.status != 200) {
            let said = answer.json["error"]["message"].as_str().unwrap_or(&answer.text);
            let said: String = said.chars().take(300).collect();
            let what = format!("it is not ready: GET {path} answers {} {said}", answer.status);
            let todo = "wait until it is loaded; if it stays so, read its log".to_owned();
            self.add(Level::Error, url, [what, "the worker".into(), todo]);
        }
        self.of_clock(url, health.clock_ahead_secs);
        self.of_role(worker);
        if worker.target.role == Role::Prefill {
            self.of_bootstrap_port(worker);
        }
    }

    fn of_clock(&mut self, url: &str, ahead: Option<i64>) {
        let Some(ahead) = ahead.filter(|ahead| ahead.abs() > CLOCK_OFF_SECS) else { return };
        let side = if ahead > 0 { "ahead of" } else { "behind" };
        let what = format!("its clock is {} s {side} the one of this machine", ahead.abs());
        let todo = "run a time service (chrony, systemd-timesyncd) on both".to_owned();
        self.add(Level::Warning, url, [what, "one of the two machines".into(), todo]);
    }

    fn of_role(&mut self, worker: &Worker) {
        let url = &worker.target.url;
        let (expected, flag) = match worker.target.role {
            Role::Prefill => ("prefill", "--prefill"),
            Role::Decode => ("decode", "--decode"),
            Role::Plain => ("null", "--worker-urls"),
        };
        match worker.info["disaggregation_mode"].as_str() {
            Some(mode) if mode != expected => {
                let what = format!("it stands under {flag}, but runs with --disaggregation-mode {mode}");
                let fault = "the gateway's settings or the worker's".to_owned();
                let todo =
                    format!("restart it with --disaggregation-mode {expected}, or name it where {mode} workers stand");
                self.add(Level::Error, url, [what, fault, todo]);
            }
            None if worker.target.role != Role::Plain => {
                let what = "it does not tell its role at GET /server_info: role and layout were not checked".to_owned();
                let todo = "if it is a Tandem or SGLang worker, check --api-key; of others, check their own settings";
                self.add(Level::Warning, url, [what, "nobody's, for other engines".into(), todo.into()]);
            }
            _ => {}
        }
    }

    fn of_bootstrap_port(&mut self, worker: &Worker) {
        let url = &worker.target.url;
        match (worker.target.bootstrap_port, worker.stated_bootstrap_port()) {
            (Some(ours), Some(theirs)) if ours != theirs => {
                let what = format!("its bootstrap port is set to {ours} here, and the worker says {theirs}");
                let todo = format!("set {theirs}, or none; leave it only if something forwards {ours} to {theirs}");
                self.add(Level::Warning, url, [what, "the gateway's settings".into(), todo]);
            }
            (None, None) if worker.info.is_object() => {
                let what = "it has no bootstrap port: decode workers cannot find it".to_owned();
                let todo = "give the port after its URL: --prefill URL PORT".to_owned();
                self.add(Level::Error, url, [what, "the gateway's settings".into(), todo]);
            }
            _ => {}
        }
    }

    fn of_pair(&mut self, prefill: &Worker, decode: &Worker, trial: Option<&Trial>) {
        let subject = format!("{} -> {}", prefill.target.url, decode.target.url);
        let mut explained = false;
        for (field, todo) in LAYOUT {
            let (p, d) = (&prefill.info[field], &decode.info[field]);
            if differ(p, d) {
                explained = true;
                let what = format!("the layouts differ: {field} is {p} at prefill, {d} at decode");
                self.add(Level::Error, &subject, [what, "whoever started the workers".into(), todo.into()]);
            }
        }
        let (p, d) = (&prefill.info["numerics"], &decode.info["numerics"]);
        if differ(p, d) {
            let what =
                format!("numerics differ ({p} at prefill, {d} at decode): answers may differ from an unsplit run");
            let todo = "run both on the same kind of processor with the same build, if that matters to you".to_owned();
            self.add(Level::Warning, &subject, [what, "the choice of machines or builds".into(), todo]);
        }
        let from_here = prefill.bootstrap.as_ref().map(|answer| answer.as_ref().copied().map_err(String::as_str));
        match (trial.map(|trial| &trial.outcome), from_here) {
            (Some(Ok(_)), _) | (None, Some(Ok(())) | None) => {}
            (Some(Err(said)), here) if !explained => {
                self.add(Level::Error, &subject, failed_trial(prefill, said, here))
            }
            (Some(Err(_)), _) => {}
            (None, Some(Err(why))) => {
                let port = prefill.bootstrap_port().unwrap_or_default();
                let what = format!("the bootstrap port {port} does not answer, asked from here: {why}");
                let todo = "check the port and that the prefill worker listens on an address of its network".to_owned();
                self.add(Level::Error, &subject, [what, "the prefill worker or the gateway's settings".into(), todo]);
            }
        }
    }
}

/// Both are known and not the same.
fn differ(p: &Value, d: &Value) -> bool {
    !p.is_null() && !d.is_null() && p != d
}

/// What a prompt that did not get through shows, beside what the bootstrap port answers here.
fn failed_trial(prefill: &Worker, said: &str, from_here: Option<Result<(), &str>>) -> [String; 3] {
    let port = prefill.bootstrap_port().unwrap_or_default();
    let what = format!("a prompt did not get through the pair: {said}");
    let place = format!("{}:{port}", prefill.target.host);
    match from_here {
        Some(Err(why)) => [
            format!("{what}; the bootstrap port {place} does not answer here either ({why})"),
            "the prefill worker, or the bootstrap port in the gateway's settings".into(),
            "check the port and that the prefill worker listens on an address of its network, not on loopback".into(),
        ],
        _ => [
            format!("{what}; from here the bootstrap port {place} answers"),
            "the network between the two workers, or what the workers say above".into(),
            format!("if the decode worker could not connect, let its machine reach {place}; else read both logs"),
        ],
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::ask::Answer;
    use super::super::targets::Target;
    use super::*;

    fn worker(role: Role, name: &str) -> Worker {
        let mode = if role == Role::Prefill { "prefill" } else { "decode" };
        let well = Answer { status: 200, clock_ahead_secs: Some(0), ..Answer::default() };
        let bootstrap_port = (role == Role::Prefill).then_some(8998);
        let target = Target { url: format!("http://{name}:1"), host: name.into(), role, bootstrap_port, api_key: None };
        let info = json!({
            "disaggregation_mode": mode, "disaggregation_bootstrap_port": 8998, "fingerprint": "f", "page_size": 16,
            "cpu_math": "fast", "numerics": "n", "version": "1",
        });
        let bootstrap = (role == Role::Prefill).then_some(Ok(()));
        Worker { target, health: Ok(well.clone()), ready: Some(well), info, model: Some("m".into()), bootstrap }
    }

    fn pair() -> Vec<Worker> {
        vec![worker(Role::Prefill, "p"), worker(Role::Decode, "d")]
    }

    fn judged(workers: Vec<Worker>, trial: Option<Result<u128, &str>>) -> Report {
        let pairs = pairs(&workers);
        let trial = trial.map(|outcome| Trial { outcome: outcome.map_err(str::to_owned) });
        let trials = pairs.iter().map(|_| trial.clone()).collect();
        judge(workers, pairs, trials, "1")
    }

    #[test]
    fn a_healthy_pair_has_no_finding() {
        let report = judged(pair(), Some(Ok(12)));
        assert!(report.ok && report.findings.is_empty(), "{report:?}");
        assert!(report.text().contains("a prompt went through in 12 ms") && report.text().contains("Nothing is wrong"));
        assert!(judged(pair(), None).text().contains("from here only"), "what was not tried is not claimed");
    }

    /// Each fault of a pair: how it is made, how bad it is, and what must be said about it.
    #[test]
    fn each_fault_is_told_with_its_remedy() {
        type Change = fn(&mut Worker, &mut Worker);
        let cases: [(Change, Level, &str, &str); 11] = [
            (|p, _| p.health = Err("connection refused".into()), Level::Error, "cannot be reached", "start the worker"),
            (|_, d| d.ready.as_mut().unwrap().status = 503, Level::Error, "not ready", "log"),
            (
                |p, _| p.info["disaggregation_mode"] = json!("decode"),
                Level::Error,
                "--prefill",
                "--disaggregation-mode",
            ),
            (|_, d| d.info = Value::Null, Level::Warning, "does not tell its role", "--api-key"),
            (|p, _| p.target.bootstrap_port = Some(9), Level::Warning, "set to 9 here", "set 8998"),
            (
                |p, _| p.bootstrap = Some(Err("refused".into())),
                Level::Error,
                "asked from here: refused",
                "check the port",
            ),
            (|_, d| d.info["page_size"] = json!(32), Level::Error, "page_size is 16 at prefill, 32", "--page-size"),
            (|_, d| d.info["fingerprint"] = json!("g"), Level::Error, "fingerprint", "--model-path"),
            (|_, d| d.info["numerics"] = json!("o"), Level::Warning, "numerics differ", "same kind of processor"),
            (|_, d| d.info["version"] = json!("2"), Level::Warning, "version 2", "one version"),
            (
                |_, d| d.health.as_mut().unwrap().clock_ahead_secs = Some(-60),
                Level::Warning,
                "60 s behind",
                "time service",
            ),
        ];
        for (change, level, what, todo) in cases {
            let mut workers = pair();
            let [p, d] = workers.as_mut_slice() else { unreachable!() };
            change(p, d);
            let report = judged(workers, None);
            let found = report.findings.iter().find(|f| f.what.contains(what) && f.todo.contains(todo));
            assert_eq!(found.map(|f| f.level), Some(level), "{what}: {report:?}");
            assert_eq!(report.ok, level == Level::Warning, "{what}: {report:?}");
        }
    }

    #[test]
    fn a_prefill_worker_without_a_port_is_an_error() {
        let mut workers = pair();
        workers[0].target.bootstrap_port = None;
        workers[0].info["disaggregation_bootstrap_port"] = Value::Null;
        assert!(judged(workers, None).findings.iter().any(|f| f.what.contains("no bootstrap port")));
    }

    #[test]
    fn a_prompt_that_fails_is_read_beside_what_is_seen_from_here() {
        let report = judged(pair(), Some(Err("the decode worker: 502 cannot connect")));
        assert!(!report.ok && report.findings[0].todo.contains("let its machine reach p:8998"), "{report:?}");
        let mut workers = pair();
        workers[0].bootstrap = Some(Err("connection refused".into()));
        let report = judged(workers.clone(), Some(Err("the decode worker: 502 cannot connect")));
        assert!(report.findings[0].what.contains("does not answer here either"), "{report:?}");
        // What only this machine cannot reach is no fault of the pair.
        assert!(judged(workers, Some(Ok(1))).ok);
        // A layout that differs explains the failure.
        let mut workers = pair();
        workers[1].info["page_size"] = json!(32);
        assert_eq!(judged(workers, Some(Err("refused"))).findings.len(), 1);
    }

    #[test]
    fn a_fleet_that_can_make_no_pair() {
        assert!(judged(vec![worker(Role::Prefill, "p")], None).findings[0].what.contains("no decode worker"));
        assert!(judged(Vec::new(), None).findings[0].what.contains("no worker"));
        let mut workers = pair();
        workers[1].model = Some("other".into());
        assert!(judged(workers, None).findings[0].todo.contains("--served-model-name"));
    }
}
