//! Owns what `up` starts: one [`ChildPlan`] per child, with its command line and addresses. *Pure.*

use std::ffi::OsString;

use super::{
    args::{CpuMath, Device, Settings},
    topology::Fleet,
};

/// Workers are reached by the gateway and by each other only, on this machine.
pub const WORKER_HOST: &str = "127.0.0.1";

/// Running exchanges may go on for this long after the request to stop. Less than the workers' 10 s, so that these are
/// still there when the gateway ends what still runs and tells its clients, also where all stop at once since `up` was
/// killed; `up` kills a little later.
pub const GATEWAY_GRACE_SECS: u32 = 8;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ChildRole {
    Gateway,
    Prefill,
    Decode,
    Plain,
}

impl ChildRole {
    /// As in `--disaggregation-mode`, and `gateway`.
    pub fn mode(self) -> &'static str {
        match self {
            ChildRole::Gateway => "gateway",
            ChildRole::Prefill => "prefill",
            ChildRole::Decode => "decode",
            ChildRole::Plain => "null",
        }
    }

    fn name(self) -> &'static str {
        match self {
            ChildRole::Plain => "plain",
            other => other.mode(),
        }
    }
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ChildPlan {
    pub name: String,
    pub role: ChildRole,
    pub host: String,
    pub port: u16,
    /// Prefill workers only: where decode workers open the handoff.
    pub bootstrap_port: Option<u16>,
    /// Gateway only.
    pub metrics_port: Option<u16>,
    pub arguments: Vec<OsString>,
}

impl ChildPlan {
    /// The address that works on this machine.
    pub fn url(&self) -> String {
        url(&self.host, self.port)
    }

    pub fn ready_url(&self) -> String {
        let path = if self.role == ChildRole::Gateway { "readiness" } else { "ready" };
        format!("{}/{path}", self.url())
    }

    pub fn metrics_url(&self) -> Option<String> {
        match (self.role, self.metrics_port) {
            (ChildRole::Gateway, Some(port)) => Some(format!("{}/metrics", url(&self.host, port))),
            _ => None,
        }
    }
}

/// `host` as a client on this machine writes it: a wildcard address becomes loopback, IPv6 gets its brackets.
fn url(host: &str, port: u16) -> String {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    match bare {
        "0.0.0.0" => format!("http://127.0.0.1:{port}"),
        "::" => format!("http://[::1]:{port}"),
        v6 if v6.contains(':') => format!("http://[{v6}]:{port}"),
        other => format!("http://{other}:{port}"),
    }
}

/// The workers of the fleet, in the order of the table. `port` gives a free port of [`WORKER_HOST`] at each call.
pub fn workers<E>(settings: &Settings, mut port: impl FnMut() -> Result<u16, E>) -> Result<Vec<ChildPlan>, E> {
    let roles: Vec<(ChildRole, u16)> = match settings.fleet {
        Fleet::Split(split) => {
            let prefill = (0..split.prefill).map(|index| (ChildRole::Prefill, index));
            prefill.chain((0..split.decode).map(|index| (ChildRole::Decode, index))).collect()
        }
        Fleet::Plain { workers } => (0..workers).map(|index| (ChildRole::Plain, index)).collect(),
    };
    let plan = |(role, index): (ChildRole, u16)| {
        let bootstrap_port = if role == ChildRole::Prefill { Some(port()?) } else { None };
        let mut plan = ChildPlan {
            name: format!("{}-{index}", role.name()),
            role,
            host: WORKER_HOST.to_owned(),
            port: port()?,
            bootstrap_port,
            metrics_port: None,
            arguments: Vec::new(),
        };
        plan.arguments = worker_arguments(settings, &plan);
        Ok(plan)
    };
    roles.into_iter().map(plan).collect()
}

/// A setting that the user did not choose is left to the worker: to the environment it inherits, then its default.
fn worker_arguments(settings: &Settings, plan: &ChildPlan) -> Vec<OsString> {
    let args = &settings.args;
    let tp_size = if plan.role == ChildRole::Prefill { args.tp_prefill } else { args.tp_decode };
    let device = args.device.map(|device| match device {
        Device::Cpu => "cpu",
        Device::Cuda => "cuda",
        Device::Auto => "auto",
    });
    let cpu_math = args.cpu_math.map(|math| match math {
        CpuMath::Exact => "exact",
        CpuMath::Fast => "fast",
    });
    let mut line = CommandLine::new("worker");
    line.flag("--model-path", &args.model_path);
    line.flag("--host", &plan.host);
    line.flag("--port", plan.port);
    line.flag("--disaggregation-mode", plan.role.mode());
    line.maybe("--disaggregation-bootstrap-port", plan.bootstrap_port);
    line.maybe("--tp-size", tp_size);
    line.maybe("--device", device);
    line.maybe("--log-level", args.log_level.as_ref());
    line.maybe("--served-model-name", args.served_model_name.as_ref());
    line.maybe("--threads", settings.threads);
    line.maybe("--cpu-math", cpu_math);
    line.maybe("--context-length", args.context_length);
    line.maybe("--max-total-tokens", args.max_total_tokens);
    line.maybe("--max-running-requests", args.max_running_requests);
    line.maybe("--chunked-prefill-size", args.chunked_prefill_size);
    line.maybe("--page-size", args.page_size);
    line.words
}

/// The gateway in front of `workers`.
pub fn gateway(settings: &Settings, workers: &[ChildPlan], port: u16, metrics_port: u16) -> ChildPlan {
    let mut line = CommandLine::new("gateway");
    line.flag("--host", &settings.gateway_host);
    line.flag("--port", port);
    line.flag("--prometheus-host", &settings.gateway_host);
    line.flag("--prometheus-port", metrics_port);
    line.flag("--shutdown-grace-period-secs", GATEWAY_GRACE_SECS);
    line.maybe("--log-level", settings.args.log_level.as_ref());
    if matches!(settings.fleet, Fleet::Split(_)) {
        line.word("--pd-disaggregation");
    }
    for worker in workers {
        match worker.role {
            ChildRole::Prefill => {
                line.flag("--prefill", worker.url());
                line.word(worker.bootstrap_port.map_or("none".to_owned(), |port| port.to_string()));
            }
            ChildRole::Decode => line.flag("--decode", worker.url()),
            ChildRole::Plain => line.flag("--worker-urls", worker.url()),
            ChildRole::Gateway => {}
        }
    }
    ChildPlan {
        name: "gateway".to_owned(),
        role: ChildRole::Gateway,
        host: settings.gateway_host.clone(),
        port,
        bootstrap_port: None,
        metrics_port: Some(metrics_port),
        arguments: line.words,
    }
}

struct CommandLine {
    words: Vec<OsString>,
}

impl CommandLine {
    fn new(subcommand: &str) -> Self {
        Self { words: vec![subcommand.into()] }
    }

    fn word(&mut self, word: impl Into<OsString>) {
        self.words.push(word.into());
    }

    fn flag(&mut self, name: &str, value: impl ToString) {
        self.word(name);
        self.word(value.to_string());
    }

    fn maybe(&mut self, name: &str, value: Option<impl ToString>) {
        if let Some(value) = value {
            self.flag(name, value);
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::{super::args::tests::parse, *};

    pub fn fleet(words: &str) -> Vec<ChildPlan> {
        let settings = Settings::new(parse(words).expect("parses"), 4, false).expect("makes sense");
        let mut next = 20_000;
        let count = || {
            next += 1;
            Ok::<_, std::convert::Infallible>(next)
        };
        let mut all = workers(&settings, count).expect("infallible");
        all.push(gateway(&settings, &all, 30_000, 29_000));
        all
    }

    fn line(plan: &ChildPlan) -> String {
        let words: Vec<_> = plan.arguments.iter().map(|word| word.to_string_lossy()).collect();
        words.join(" ")
    }

    #[test]
    fn one_pair_is_wired_through_the_bootstrap_port() {
        let fleet = fleet("1p1d --tp-prefill 2 --device cpu --context-length 512");
        assert_eq!(
            line(&fleet[0]),
            "worker --model-path smollm2 --host 127.0.0.1 --port 20002 --disaggregation-mode prefill \
             --disaggregation-bootstrap-port 20001 --tp-size 2 --device cpu --threads 4 \
             --context-length 512"
        );
        assert_eq!(
            line(&fleet[1]),
            "worker --model-path smollm2 --host 127.0.0.1 --port 20003 --disaggregation-mode decode \
             --device cpu --threads 4 --context-length 512"
        );
        assert_eq!(
            line(&fleet[2]),
            "gateway --host 127.0.0.1 --port 30000 --prometheus-host 127.0.0.1 --prometheus-port 29000 \
             --shutdown-grace-period-secs 8 --pd-disaggregation \
             --prefill http://127.0.0.1:20002 20001 --decode http://127.0.0.1:20003"
        );
    }

    #[test]
    fn plain_workers_stand_behind_the_same_gateway() {
        let fleet = fleet("0p0d --plain 2");
        assert!(line(&fleet[0]).contains("--disaggregation-mode null --threads 2"));
        assert_eq!(fleet[1].name, "plain-1");
        assert!(line(&fleet[2]).ends_with("--worker-urls http://127.0.0.1:20001 --worker-urls http://127.0.0.1:20002"));
        assert!(!line(&fleet[2]).contains("--pd-disaggregation"));
    }

    #[test]
    fn a_wildcard_host_is_shown_as_an_address_that_works_here() {
        assert_eq!(url("0.0.0.0", 1), "http://127.0.0.1:1");
        assert_eq!(url("::", 1), "http://[::1]:1");
        assert_eq!(url("[::1]", 1), "http://[::1]:1");
        assert_eq!(url("gpu7", 1), "http://gpu7:1");
        assert_eq!(fleet("1p1d --host 0.0.0.0")[2].ready_url(), "http://127.0.0.1:30000/readiness");
    }
}
