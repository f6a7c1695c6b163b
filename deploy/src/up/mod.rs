//! Owns `tandem up`: a fleet of workers and the gateway as child processes of this one, on one machine. The story is
//! [`run`]: choose ports, fetch the model, start the workers, then the gateway, show the table, and watch until a
//! signal comes or a child dies; then stop all. Promises that nothing it started outlives it.

mod args;
mod child;
mod logs;
mod plan;
mod ports;
mod readiness;
mod table;
mod topology;

use std::{io, path::PathBuf, time::Duration};

use tandem_model::{LoadOptions, ModelError, SMOLLM2};
use tokio::signal::unix::{Signal, SignalKind, signal};

use args::Settings;
pub use args::UpArgs;
use child::{Children, Death, SpawnError};
use logs::Terminal;
use plan::ChildPlan;
use ports::{PortError, Ports};
use readiness::NotReady;
use topology::TopologyError;

/// From the request to stop to SIGKILL, for the gateway and then for the workers: longer than the children allow running
/// requests by default.
const STOP_GRACE: Duration = Duration::from_secs(20);
/// One Ctrl-C may reach us twice, from the terminal and from a script that passes it on; only a later one means hurry.
const SAME_SIGNAL: Duration = Duration::from_millis(700);

#[derive(Debug, thiserror::Error)]
pub enum UpError {
    #[error(transparent)]
    Topology(#[from] TopologyError),
    #[error(transparent)]
    Port(#[from] PortError),
    #[error(transparent)]
    Spawn(#[from] SpawnError),
    #[error(transparent)]
    NotReady(#[from] NotReady),
    #[error("{}", tell(.0))]
    Died(Box<Death>),
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error("cannot make the log folder {path}: {source}; choose another with --log-dir")]
    LogFolder { path: PathBuf, source: io::Error },
    #[error("cannot write the ready file {path}: {source}; choose another with --ready-file")]
    ReadyFile { path: PathBuf, source: io::Error },
    #[error("the operating system refused {what}: {source}")]
    System { what: &'static str, source: io::Error },
}

fn tell(death: &Death) -> String {
    let Death { name, pid, how, after, last_lines } = death;
    let mut text = format!("{name} (pid {pid}) {how} after {:.1} s; everything else was stopped.", after.as_secs_f32());
    match last_lines.as_slice() {
        [] => text.push_str(" It logged nothing."),
        lines => {
            text.push_str(" Its last log lines:");
            lines.iter().for_each(|line| text.extend(["\n    ", line]));
        }
    }
    text
}

/// Serves until SIGINT, SIGTERM or SIGHUP, which is success, or until a child dies, which is an error.
pub fn run(args: UpArgs) -> Result<(), UpError> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads_in_environment = std::env::var_os("TANDEM_WORKER_THREADS").is_some();
    let settings = Settings::new(args, cores, threads_in_environment)?;
    prepare_ready_file(&settings)?;
    let (ports, workers, gateway) = plans(&settings)?;
    if settings.args.model_path == SMOLLM2 {
        // Once, here, where its progress can be seen; the children find it in the cache.
        tandem_model::smollm2(&LoadOptions { show_progress: true, ..LoadOptions::default() })?;
    }
    ports.release();
    let system = |what| move |source| UpError::System { what, source };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(system("threads for supervision"))?;
    runtime.block_on(supervise(&settings, workers, gateway))
}

async fn supervise(settings: &Settings, workers: Vec<ChildPlan>, gateway: ChildPlan) -> Result<(), UpError> {
    let system = |what| move |source| UpError::System { what, source };
    let mut signals = StopSignals::new().map_err(system("signal handlers"))?;
    let program = std::env::current_exe().map_err(system("the path of this program"))?;
    if let Some(path) = &settings.args.log_dir {
        std::fs::create_dir_all(path).map_err(|source| UpError::LogFolder { path: path.clone(), source })?;
    }
    let names = workers.iter().map(|plan| plan.name.as_str());
    let terminal = Terminal::new(names.chain([gateway.name.as_str()]));
    let mut children = Children::new(program, terminal.clone(), settings.args.log_dir.clone());
    let served = serve(settings, workers, gateway, &mut children, &mut signals, &terminal).await;
    remove_ready_file(settings);
    let grace = plan::GATEWAY_GRACE_SECS;
    terminal
        .line("up", &format!("stopping: running requests have {grace} s to end; Ctrl-C again kills everything now"));
    for name in children.stop(STOP_GRACE, signals.next_after(SAME_SIGNAL)).await {
        terminal.line("up", &format!("{name} had not stopped yet and was killed"));
    }
    served
}

/// Who will listen where: workers and gateway, and the ports still held for them.
fn plans(settings: &Settings) -> Result<(Ports, Vec<ChildPlan>, ChildPlan), PortError> {
    let mut ports = Ports::new();
    let host = &settings.gateway_host;
    let port = ports.take("--port", host, settings.args.port)?;
    let metrics_port = ports.take("--prometheus-port", host, settings.args.prometheus_port)?;
    let workers = plan::workers(settings, || ports.any(plan::WORKER_HOST))?;
    let gateway = plan::gateway(settings, &workers, port, metrics_port);
    Ok((ports, workers, gateway))
}

/// Starts everything in order and watches it; returns at a signal (`Ok`) or at the first thing that goes wrong.
async fn serve(
    settings: &Settings,
    workers: Vec<ChildPlan>,
    gateway: ChildPlan,
    children: &mut Children,
    signals: &mut StopSignals,
    terminal: &Terminal,
) -> Result<(), UpError> {
    // Workers first: a gateway that finds its workers ready at its first look has nothing to wait for.
    for stage in [workers, vec![gateway]] {
        for plan in &stage {
            children.spawn(plan.clone())?;
        }
        tokio::select! {
            ready = readiness::all(&stage, settings.start_timeout, terminal) => ready?,
            death = children.first_death() => return Err(UpError::Died(Box::new(death))),
            () = signals.next() => return Ok(()),
        }
    }
    announce(settings, children)?;
    tokio::select! {
        death = children.first_death() => Err(UpError::Died(Box::new(death))),
        () = signals.next() => Ok(()),
    }
}

fn announce(settings: &Settings, children: &Children) -> Result<(), UpError> {
    use std::io::Write as _;
    let list = children.list();
    // Someone who closed our stdout does not read the table; serving goes on.
    write!(io::stdout(), "\n{}\n", table::render(&list)).ok();
    if let Some(path) = &settings.args.ready_file {
        let value = table::ready_json(&list, std::process::id());
        table::write_ready_file(path, &value).map_err(|source| UpError::ReadyFile { path: path.clone(), source })?;
    }
    Ok(())
}

/// That the file cannot be written is known now, not when all has been started.
fn prepare_ready_file(settings: &Settings) -> Result<(), UpError> {
    remove_ready_file(settings);
    let Some(path) = &settings.args.ready_file else { return Ok(()) };
    table::try_ready_file(path).map_err(|source| UpError::ReadyFile { path: path.clone(), source })
}

/// Addresses of an earlier run, or of this one once it ends, would only mislead.
fn remove_ready_file(settings: &Settings) {
    if let Some(path) = &settings.args.ready_file {
        std::fs::remove_file(path).ok();
    }
}

/// Ctrl-C, a polite kill, and a closed terminal.
struct StopSignals([Signal; 3]);

impl StopSignals {
    fn new() -> io::Result<Self> {
        let kinds = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()];
        let [interrupt, terminate, hangup] = kinds.map(signal);
        Ok(Self([interrupt?, terminate?, hangup?]))
    }

    async fn next(&mut self) {
        let [interrupt, terminate, hangup] = &mut self.0;
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            _ = hangup.recv() => {}
        }
    }

    /// The next signal that does not come within `quiet` from now.
    async fn next_after(&mut self, quiet: Duration) {
        let end = tokio::time::Instant::now() + quiet;
        while tokio::time::timeout_at(end, self.next()).await.is_ok() {}
        self.next().await;
    }
}
