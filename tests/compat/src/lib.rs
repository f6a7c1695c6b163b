//! Real peers and clients against the product: where their Python lives, and how they are started.
//!
//! The environment is made by `tests/compat/venv` from pinned packages; these tests never install anything.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use tandem_e2e::process::Process;
use tandem_e2e::wait;
use tandem_e2e::{Client, Fleet, Role, net};

/// A Python interpreter that can import the pinned packages; instead of the one that `tests/compat/venv` makes.
const OVERRIDE: &str = "TANDEM_PEERS_PYTHON";
/// Importing its packages takes a peer seconds on a busy machine.
const PEER_READY_LIMIT: Duration = Duration::from_secs(60);

/// This crate's folder.
pub fn folder() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The interpreter of the pinned environment.
///
/// # Panics
/// With the command to run when the environment cannot be made.
pub fn python() -> PathBuf {
    if let Some(path) = std::env::var_os(OVERRIDE) {
        return path.into();
    }
    let script = folder().join("venv");
    let output = Command::new(&script).output().unwrap_or_else(|error| panic!("{}: {error}", script.display()));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{} failed; run it by hand to see why:\n{said}", script.display());
    Path::new(String::from_utf8_lossy(&output.stdout).trim()).join("bin/python")
}

/// sglang-router in front of the fleet's workers.
pub struct Router {
    pub process: Process,
    pub client: Client,
}

impl Router {
    /// Starts the router with `--pd-disaggregation` and waits until it takes both workers for healthy.
    pub async fn start(fleet: &Fleet) -> Self {
        let port = net::free_port();
        let mut command = Command::new(python());
        command.args(["-m", "sglang_router.launch_router", "--pd-disaggregation", "--disable-retries"]);
        command.args(["--host", &net::host().to_string(), "--port", &port.to_string()]);
        command.args([
            "--prometheus-host",
            &net::host().to_string(),
            "--prometheus-port",
            &net::free_port().to_string(),
        ]);
        command.args(["--policy", "round_robin", "--worker-startup-check-interval", "1", "--log-level", "warn"]);
        for worker in &fleet.workers {
            match worker.role {
                Role::Prefill => command.args(["--prefill", &worker.url(), &worker.bootstrap_port.to_string()]),
                Role::Decode => command.args(["--decode", &worker.url()]),
                Role::Plain => panic!("a plain worker has no place in a split"),
            };
        }
        let process = Process::spawn("sglang-router", &mut command, fleet.logs());
        let client = Client::pooled(format!("http://{}:{port}", net::host()));
        wait::until("sglang-router to be ready", PEER_READY_LIMIT, || async {
            let answer = client.get("/readiness").await?;
            if answer.status == 200 { Ok(()) } else { Err(answer.text()) }
        })
        .await;
        Self { process, client }
    }
}

/// A scenario of `python/openai_client.py` against `url`, as a process of its own.
pub fn openai_client(fleet: &Fleet, scenario: &str, key: &str) -> Process {
    let mut command = Command::new(python());
    command.arg("-u").arg(folder().join("python/openai_client.py")).args([&fleet.url(), scenario, key]);
    Process::spawn(&format!("openai-{scenario}"), &mut command, fleet.logs())
}
