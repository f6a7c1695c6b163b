//! Fleets of real workers behind a real gateway, on the loopback address of this test.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::time::Duration;

use crate::client::Client;
use crate::loads::{self, Loads};
use crate::process::{LogFolder, Process};
use crate::proxy::Proxy;
use crate::{binary, checkpoint, net, wait};

/// The name under which a fleet serves its model.
pub const MODEL: &str = "tiny";

/// A tiny checkpoint is ready in well under a second; a loaded machine gets more.
const READY_LIMIT: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    Plain,
    Prefill,
    Decode,
}

impl Role {
    fn mode(self) -> &'static str {
        match self {
            Role::Plain => "null",
            Role::Prefill => "prefill",
            Role::Decode => "decode",
        }
    }
}

/// What to start. Arguments are given as one line, split at spaces.
#[derive(Clone)]
pub struct FleetOptions {
    pub model: String,
    pub prefills: usize,
    pub decodes: usize,
    pub plains: usize,
    pub worker_args: String,
    pub prefill_args: String,
    pub decode_args: String,
    pub gateway_args: String,
    pub with_gateway: bool,
    /// A proxy stands before each prefill worker's bootstrap port.
    pub with_proxies: bool,
}

impl FleetOptions {
    /// `prefills` and `decodes` behind a gateway, with the tiny checkpoint.
    pub fn pd(prefills: usize, decodes: usize) -> Self {
        Self {
            model: checkpoint::golden(checkpoint::TINY).display().to_string(),
            prefills,
            decodes,
            plains: 0,
            worker_args: String::new(),
            prefill_args: String::new(),
            decode_args: String::new(),
            gateway_args: String::new(),
            with_gateway: true,
            with_proxies: false,
        }
    }

    /// One unsplit worker behind a gateway.
    pub fn plain() -> Self {
        Self { plains: 1, ..Self::pd(0, 0) }
    }

    pub fn model(self, model: impl Into<String>) -> Self {
        Self { model: model.into(), ..self }
    }

    /// Arguments of every worker.
    pub fn worker_args(self, line: &str) -> Self {
        Self { worker_args: line.into(), ..self }
    }

    pub fn prefill_args(self, line: &str) -> Self {
        Self { prefill_args: line.into(), ..self }
    }

    pub fn decode_args(self, line: &str) -> Self {
        Self { decode_args: line.into(), ..self }
    }

    pub fn gateway_args(self, line: &str) -> Self {
        Self { gateway_args: line.into(), ..self }
    }

    /// With a [`Proxy`] before each prefill worker's bootstrap port.
    pub fn proxied(self) -> Self {
        Self { with_proxies: true, ..self }
    }

    /// The workers alone, for a peer's gateway in front.
    pub fn without_gateway(self) -> Self {
        Self { with_gateway: false, ..self }
    }
}

/// One worker: its place outlives its process, so that it can come back on the same port.
pub struct Worker {
    pub name: String,
    pub role: Role,
    pub port: u16,
    pub bootstrap_port: u16,
    /// Stands before the bootstrap port, and is where the gateway sends decode workers.
    pub proxy: Option<Proxy>,
    args: Vec<String>,
    process: Option<Process>,
}

impl Worker {
    fn new(options: &FleetOptions, role: Role, index: usize) -> Self {
        let ports = net::free_ports(2);
        let name = format!("{role:?}-{index}").to_lowercase();
        let mut args: Vec<String> =
            ["worker", "--model-path", &options.model, "--served-model-name", MODEL].map(Into::into).into();
        args.extend(["--host".into(), net::host().to_string(), "--port".into(), ports[0].to_string()]);
        args.extend(["--disaggregation-mode".into(), role.mode().into()]);
        if role == Role::Prefill {
            args.extend(["--disaggregation-bootstrap-port".into(), ports[1].to_string()]);
        }
        let of_role = match role {
            Role::Plain => "",
            Role::Prefill => &options.prefill_args,
            Role::Decode => &options.decode_args,
        };
        for line in [&options.worker_args, of_role] {
            args.extend(line.split_whitespace().map(Into::into));
        }
        Self { name, role, port: ports[0], bootstrap_port: ports[1], proxy: None, args, process: None }
    }

    pub fn url(&self) -> String {
        format!("http://{}:{}", net::host(), self.port)
    }

    pub fn client(&self) -> Client {
        Client::new(self.url())
    }

    pub async fn loads(&self) -> Loads {
        Loads::read(&self.client()).await.unwrap_or_else(|error| panic!("{}: {error}", self.name))
    }

    /// As `kill -9`: no word to anybody.
    pub fn kill(&mut self) {
        self.process.take().expect("the worker runs").kill();
    }

    /// Sends a signal by name, such as `STOP`.
    pub fn signal(&self, signal: &str) {
        self.process.as_ref().expect("the worker runs").signal(signal);
    }

    /// The running process.
    pub fn process(&mut self) -> &mut Process {
        self.process.as_mut().expect("the worker runs")
    }

    /// The proxy before a prefill worker.
    pub fn proxy(&self) -> &Proxy {
        self.proxy.as_ref().expect("the fleet was started with proxies")
    }

    /// Starts the process on this worker's ports, without waiting.
    pub fn start(&mut self, logs: &Path) {
        self.process = Some(Process::spawn(&self.name, Command::new(binary::tandem()).args(&self.args), logs));
    }

    /// Waits until `/ready` says so.
    pub async fn until_ready(&mut self) {
        let client = self.client();
        until_answers(&self.name, self.process.as_mut().expect("the worker runs"), &client, "/ready").await;
    }
}

/// A running fleet. Dropping it kills every process and checks the logs.
pub struct Fleet {
    pub workers: Vec<Worker>,
    pub gateway_port: u16,
    gateway: Option<Process>,
    logs: LogFolder,
}

impl Fleet {
    /// Starts everything and waits until it is ready. `test` names the logs.
    pub async fn start(test: &str, options: FleetOptions) -> Self {
        let logs = LogFolder::new(test);
        let of = |role, count| (0..count).map(move |index| (role, index));
        let places = of(Role::Prefill, options.prefills).chain(of(Role::Decode, options.decodes));
        let places = places.chain(of(Role::Plain, options.plains));
        let mut workers: Vec<Worker> = places.map(|(role, index)| Worker::new(&options, role, index)).collect();
        for worker in workers.iter_mut().filter(|worker| options.with_proxies && worker.role == Role::Prefill) {
            worker.proxy = Some(Proxy::before(worker.bootstrap_port).await);
        }
        workers.iter_mut().for_each(|worker| worker.start(logs.path()));
        for worker in &mut workers {
            worker.until_ready().await;
        }
        let mut fleet = Self { workers, gateway_port: net::free_port(), gateway: None, logs };
        if options.with_gateway {
            fleet.start_gateway(&options.gateway_args).await;
        }
        fleet
    }

    async fn start_gateway(&mut self, more: &str) {
        let mut command = Command::new(binary::tandem());
        command.args(["gateway", "--host", &net::host().to_string(), "--port", &self.gateway_port.to_string()]);
        command.args([
            "--prometheus-host",
            &net::host().to_string(),
            "--prometheus-port",
            &net::free_port().to_string(),
        ]);
        // Workers die here on purpose, and what counts is what comes of each request; breakers have tests of their own.
        command.arg("--disable-circuit-breaker");
        command.args(gateway_members(&self.workers));
        command.args(more.split_whitespace());
        let gateway = self.gateway.insert(Process::spawn("gateway", &mut command, self.logs.path()));
        let client = Client::new(format!("http://{}:{}", net::host(), self.gateway_port));
        until_answers("gateway", gateway, &client, "/readiness").await;
    }

    /// The gateway's address: where a client of the product goes.
    pub fn url(&self) -> String {
        format!("http://{}:{}", net::host(), self.gateway_port)
    }

    pub fn client(&self) -> Client {
        Client::new(self.url())
    }

    pub fn logs(&self) -> &Path {
        self.logs.path()
    }

    /// Where this worker logs.
    pub fn log_of(&self, worker: &Worker) -> PathBuf {
        self.logs.path().join(format!("{}.log", worker.name))
    }

    /// The place of the `nth` worker of a role.
    pub fn place(&self, role: Role, nth: usize) -> usize {
        let mut of_role = (0..self.workers.len()).filter(|&at| self.workers[at].role == role);
        of_role.nth(nth).expect("the fleet has such a worker")
    }

    /// The first worker of a role.
    pub fn first(&mut self, role: Role) -> &mut Worker {
        self.workers.iter_mut().find(|worker| worker.role == role).expect("the fleet has such a worker")
    }

    /// Starts a killed worker again on its own ports and waits until it is ready.
    pub async fn revive(&mut self, role: Role) {
        self.revive_at(self.place(role, 0)).await;
    }

    /// The same for the worker at a place.
    pub async fn revive_at(&mut self, place: usize) {
        let worker = &mut self.workers[place];
        worker.start(self.logs.path());
        worker.until_ready().await;
    }

    /// Waits until each running worker is at rest with a full pool.
    pub async fn until_at_rest(&self, limit: Duration) {
        for worker in self.workers.iter().filter(|worker| worker.process.is_some()) {
            loads::until_at_rest(&worker.name, &worker.client(), limit).await;
        }
    }
}

/// The workers in the words of the gateway's command line.
fn gateway_members(workers: &[Worker]) -> Vec<String> {
    let mut args = Vec::new();
    if workers.iter().any(|worker| worker.role != Role::Plain) {
        args.push("--pd-disaggregation".to_owned());
    }
    for worker in workers {
        match worker.role {
            Role::Prefill => {
                let port = worker.proxy.as_ref().map_or(worker.bootstrap_port, |proxy| proxy.port);
                args.extend(["--prefill".into(), worker.url(), port.to_string()]);
            }
            Role::Decode => args.extend(["--decode".into(), worker.url()]),
            Role::Plain => args.extend(["--worker-urls".into(), worker.url()]),
        }
    }
    args
}

/// Waits for status 200 at `path`; an end of the process ends the wait at once with its log.
async fn until_answers(name: &str, process: &mut Process, client: &Client, path: &str) {
    let process = Mutex::new(process);
    wait::until(&format!("{name} to be ready"), READY_LIMIT, || async {
        {
            let mut process = process.lock().expect("nobody panics while holding it");
            if let Some(status) = process.exit_status() {
                panic!("{name} ended with {status} before it was ready:\n{}", process.log_tail());
            }
        }
        match client.get(path).await {
            Ok(answer) if answer.status == 200 => Ok(()),
            Ok(answer) => Err(format!("{path} answers {}: {}", answer.status, answer.text())),
            Err(error) => Err(error),
        }
    })
    .await;
}
