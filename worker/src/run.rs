//! `tandem worker` as a library call: settings, model, engine, role, HTTP, and an orderly end.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use tandem_handoff::{ids::Time, ticket::Address};
use tandem_model::{LoadOptions, Model, ModelConfig, ModelError};
use tokio::{
    net::TcpSocket,
    runtime::{Builder, Runtime},
    signal::unix::{Signal, SignalKind, signal},
    sync::watch,
};

use crate::{
    backend::{
        Backend,
        cpu::{self, Cpu},
    },
    bootstrap::{BootstrapPort, HandoffKey, HandoffParts, HandoffStartError, stats::HandoffStats},
    config::{
        EngineConfig, Role, WorkerArgs,
        check::{ModelFacts, Settings},
    },
    decode_role::DecodeRole,
    engine::{self, EngineHandle, EngineParts, EngineWaker, RoleDriver},
    error::StartError,
    host,
    http::{self, App, Facts, body::BodyLimits, listen, preparing::Preparing},
    metrics::Metrics,
    prefill_role::PrefillRole,
};

/// Threads that carry sockets; the engine and the backend have their own.
const IO_THREADS: usize = 2;
/// After running requests were cut, for their last events to leave.
const CUT_GRACE: Duration = Duration::from_secs(2);
/// Between two looks at whether requests still run.
const REST_LOOK: Duration = Duration::from_millis(20);
/// For the engine thread to end.
const ENGINE_GRACE: Duration = Duration::from_secs(5);

/// Why a worker stopped, in order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ended {
    /// It was told to.
    Ordered,
    /// Too many of its pages were in quarantine.
    Quarantined,
}

impl Ended {
    /// The process's exit status: 0, or a 3 that no other end has (1 is a failed start, 2 a wrong command line).
    pub fn exit_status(self) -> u8 {
        match self {
            Ended::Ordered => 0,
            Ended::Quarantined => 3,
        }
    }
}

/// Serves until SIGTERM or SIGINT, or until its quarantine is over the limit.
///
/// # Errors
/// What keeps the worker from starting; the message says what to do.
pub fn run(args: WorkerArgs) -> Result<Ended, StartError> {
    let settings = Settings::check(&args.merged()?, host::cores())?;
    if !settings.idle_flags.is_empty() {
        let flags = settings.idle_flags.join(", ");
        tracing::warn!(flags, role = settings.role.name(), "settings that do nothing in this role");
    }
    let runtime = Builder::new_multi_thread()
        .worker_threads(IO_THREADS)
        .enable_all()
        .build()
        .map_err(|e| StartError::Http(format!("no runtime: {e}")))?;
    // Ports and the key come first: that one is taken or missing is known in a moment, the model takes minutes.
    let socket = runtime.block_on(listen::bind(&settings.http.host, settings.http.port)).map_err(|e| {
        let (host, port) = (&settings.http.host, &settings.http.port);
        let address = Address { host: host.clone(), port: *port };
        StartError::Http(format!("cannot listen on {address}: {e}; choose another with --host and --port"))
    })?;
    let taken = runtime.block_on(Taken::by(&settings)).map_err(|e| StartError::Handoff(e.to_string()))?;
    let worker = Worker::start(settings, taken, &runtime, &socket)?;
    let ended = runtime.block_on(worker.serve(socket))?;
    // Blocking tasks may still tokenize for a client that is gone.
    runtime.shutdown_background();
    Ok(ended)
}

/// A loaded worker that does not listen yet.
struct Worker {
    app: Arc<App>,
    engine: EngineHandle,
    settings: Settings,
}

impl Worker {
    fn start(settings: Settings, taken: Taken, runtime: &Runtime, socket: &TcpSocket) -> Result<Worker, StartError> {
        let began = Instant::now();
        let (config, model) = load(&settings)?;
        let facts = facts(&settings, &config, &model, socket)?;
        let Model { config: shape, weights, tokenizer, generation, fingerprint, .. } = model;
        let backend = Cpu::start(&shape, weights, &config, settings.shares_pools())
            .map_err(|e| StartError::Engine(e.to_string()))?;
        let facts = Facts { numerics: backend.numerics_id(), ..facts };
        let metrics = Arc::new(Metrics::new(&settings.served_model_name, settings.role.engine_type()));
        let waker = EngineWaker::new();
        let parts = HandoffParts {
            config: &settings.handoff,
            shape: cpu::pool_shape(&shape, &config),
            memories: backend.memory().to_vec(),
            fingerprint: fingerprint.0,
            numerics: facts.numerics.clone(),
            waker: waker.clone().into_fn(),
            runtime: runtime.handle().clone(),
            stats: Arc::new(HandoffStats::feeding(metrics.transfer.clone())),
        };
        let (role, bootstrap_port) = taken.start(parts)?;
        let facts = Facts { bootstrap_port: bootstrap_port.unwrap_or(facts.bootstrap_port), ..facts };
        let engine = engine::spawn(EngineParts {
            config,
            backend: Box::new(backend),
            text: Arc::new(tokenizer.clone()),
            eos: generation.eos_token_ids.clone().into(),
            role,
            waker,
            clock: clock(),
        })
        .map_err(|e| StartError::Engine(format!("no thread for the engine: {e}")))?;
        tracing::info!(
            model = facts.served_model_name,
            role = facts.role.name(),
            tokens = facts.max_total_tokens,
            context = facts.context_length,
            numerics = facts.numerics,
            seconds = began.elapsed().as_secs_f32(),
            "model loaded"
        );
        let app = Arc::new(App {
            engine: Arc::new(engine.clone()),
            tokenizer,
            generation,
            facts,
            metrics,
            body_limits: BodyLimits {
                bytes_max: settings.http.body_bytes_max,
                time_max: Duration::from_millis(settings.http.body_timeout_ms),
            },
            api_key: settings.http.api_key.clone(),
            stopping: AtomicBool::new(false),
            preparing: Preparing::new(host::cores()),
        });
        Ok(Worker { app, engine, settings })
    }

    async fn serve(self, socket: TcpSocket) -> Result<Ended, StartError> {
        let http = &self.settings.http;
        let mut signals = Signals::new()?;
        let listener = listen::listen(socket).map_err(|e| StartError::Http(format!("cannot listen: {e}")))?;
        let (stop, stopped) = watch::channel(false);
        let router = http::router(self.app.clone());
        let mut server = listen::Server::new(router, http.header_timeout_ms, http.connections_max, stopped);
        let facts = &self.app.facts;
        let address = Address { host: facts.host.clone(), port: facts.port };
        tracing::info!("ready: http://{address} ({})", facts.role.name());
        let grace = Duration::from_millis(http.shutdown_grace_ms);
        let order = async {
            let order = self.until_stop(&mut signals, grace).await;
            self.app.stopping.store(true, Ordering::Release);
            let _ = stop.send(true);
            order
        };
        let ((), (ended, deadline)) = tokio::join!(server.accept(listener), order);
        let quiet = tokio::select! {
            quiet = server.drain(deadline.saturating_duration_since(Instant::now())) => quiet,
            name = signals.next() => {
                tracing::info!("{name} again: running requests are cut");
                false
            }
        };
        self.engine.shutdown();
        if !quiet {
            server.drain(CUT_GRACE).await;
        }
        let patience = Instant::now();
        while self.engine.is_alive() && patience.elapsed() < ENGINE_GRACE {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        tracing::info!("stopped");
        Ok(ended)
    }

    /// Waits until the worker must stop listening; running requests have until the instant. Over the quarantine's limit
    /// it goes on listening until nothing runs, so that whoever asks for its health is told.
    async fn until_stop(&self, signals: &mut Signals, grace: Duration) -> (Ended, Instant) {
        let excess = tokio::select! {
            name = signals.next() => {
                tracing::info!("{name}: stopping, running requests have {} ms", grace.as_millis());
                return (Ended::Ordered, Instant::now() + grace);
            }
            excess = self.engine.until_excess() => excess,
        };
        let status = Ended::Quarantined.exit_status();
        tracing::error!(
            "{excess}. This worker admits nothing more, gives running requests {} ms, and exits with status {status}; its \
             end makes the pages safe, so start it again",
            grace.as_millis()
        );
        let deadline = Instant::now() + grace;
        while self.engine.loads().total_tokens > 0 && Instant::now() < deadline {
            tokio::select! {
                () = tokio::time::sleep(REST_LOOK) => {}
                name = signals.next() => {
                    tracing::info!("{name}: running requests are not waited for");
                    return (Ended::Quarantined, Instant::now());
                }
            }
        }
        (Ended::Quarantined, deadline)
    }
}

/// The limits are checked against the model's configuration before its weights are looked at.
fn load(settings: &Settings) -> Result<(EngineConfig, Model), StartError> {
    let options = LoadOptions { show_progress: true, ..LoadOptions::default() };
    let failed = |error: ModelError| StartError::Model(error.to_string());
    let shape = tandem_model::load_config(&settings.model_path, &options).map_err(failed)?;
    let config = engine_config(settings, &shape)?;
    Ok((config, tandem_model::load(&settings.model_path, &options).map_err(failed)?))
}

fn engine_config(settings: &Settings, shape: &ModelConfig) -> Result<EngineConfig, StartError> {
    let element_bytes = cpu::element_bytes(settings.cpu_math) as usize;
    settings.engine(&ModelFacts {
        max_positions: shape.max_positions,
        kv_heads: shape.kv_heads,
        heads: shape.heads,
        bytes_per_token: shape.layers * shape.kv_heads * 2 * shape.head_dim * element_bytes,
        available_bytes: host::available_bytes(),
    })
}

/// All but the numerics, which the backend knows.
fn facts(settings: &Settings, config: &EngineConfig, model: &Model, socket: &TcpSocket) -> Result<Facts, StartError> {
    let address = socket.local_addr().map_err(|e| StartError::Http(format!("the listening address: {e}")))?;
    Ok(Facts {
        model_path: settings.model_path.clone(),
        served_model_name: settings.served_model_name.clone(),
        model_type: format!("{:?}", model.config.architecture).to_lowercase(),
        fingerprint: model.fingerprint.to_string(),
        host: settings.http.host.clone(),
        port: address.port(),
        role: settings.role,
        bootstrap_port: settings.handoff.bootstrap_port,
        tp_size: config.tp_size,
        page_size: config.page_size,
        chunked_prefill_size: config.chunked_prefill_size,
        max_running_requests: config.max_running_requests,
        max_total_tokens: config.max_total_tokens,
        context_length: config.context_length,
        num_reserved_decode_tokens: config.num_reserved_decode_tokens,
        device: "cpu",
        cpu_math: config.cpu_math,
        threads: config.threads,
        numerics: String::new(),
        vocab_size: model.config.vocab,
        started_unix: http::openai::unix_seconds(),
    })
}

/// What a role takes of this machine before the model is loaded.
enum Taken {
    Null,
    Prefill(BootstrapPort),
    Decode(HandoffKey),
}

impl Taken {
    async fn by(settings: &Settings) -> Result<Self, HandoffStartError> {
        let config = &settings.handoff;
        Ok(match settings.role {
            Role::Null => Taken::Null,
            Role::Prefill => Taken::Prefill(BootstrapPort::take(config).await?),
            Role::Decode => Taken::Decode(HandoffKey::load(config.key_file.as_deref())?),
        })
    }

    /// The worker's side of the handoff, and the bootstrap port that it listens on.
    fn start(self, parts: HandoffParts<'_>) -> Result<(RoleDriver, Option<u16>), StartError> {
        match self {
            Taken::Null => Ok((RoleDriver::Null, None)),
            Taken::Prefill(port) => {
                let (role, address) =
                    PrefillRole::start(parts, port).map_err(|e| StartError::Handoff(e.to_string()))?;
                Ok((RoleDriver::Prefill(Box::new(role)), Some(address.port())))
            }
            Taken::Decode(key) => Ok((RoleDriver::Decode(Box::new(DecodeRole::start(parts, key))), None)),
        }
    }
}

/// Microseconds since the process began, for deadlines (H6).
fn clock() -> Arc<dyn Fn() -> Time + Send + Sync> {
    let began = Instant::now();
    Arc::new(move || Time(began.elapsed().as_micros() as u64))
}

/// The orders to stop.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> Result<Signals, StartError> {
        let listen = |kind| signal(kind).map_err(|e| StartError::Http(format!("signals cannot be received: {e}")));
        Ok(Signals { terminate: listen(SignalKind::terminate())?, interrupt: listen(SignalKind::interrupt())? })
    }

    async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(change: impl FnOnce(&mut WorkerArgs)) -> Settings {
        let mut args = WorkerArgs { model_path: Some("/nowhere".into()), port: Some(0), ..WorkerArgs::default() };
        change(&mut args);
        Settings::check(&args, 1).expect("the settings are sound")
    }

    #[test]
    fn a_key_that_is_not_there_and_a_port_that_is_taken_are_known_before_the_model() {
        let runtime = Builder::new_current_thread().enable_all().build().expect("runtime");
        let busy = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = busy.local_addr().expect("its address").port();
        for role in [Role::Prefill, Role::Decode] {
            let keyless = settings(|args| {
                args.disaggregation_mode = Some(role);
                args.disaggregation_bootstrap_port = Some(port);
                args.handoff_key_file = Some("/nowhere/key".into());
            });
            let error = runtime.block_on(Taken::by(&keyless)).err().expect("no key").to_string();
            assert!(error.contains("/nowhere/key"), "{error}");
        }
        let taken = settings(|args| {
            args.disaggregation_mode = Some(Role::Prefill);
            args.disaggregation_bootstrap_port = Some(port);
        });
        let error = runtime.block_on(Taken::by(&taken)).err().expect("a taken port").to_string();
        assert!(error.contains("--disaggregation-bootstrap-port"), "{error}");
    }

    #[test]
    fn what_does_not_fit_the_configuration_is_refused_before_the_weights_are_missed() {
        let folder = std::env::temp_dir().join(format!("tandem-run-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/data/llama-gqa/config.json");
        std::fs::copy(golden, folder.join("config.json")).expect("a copy");
        let with_ranks = |ranks| {
            settings(|args| {
                args.model_path = folder.to_str().map(Into::into);
                args.tp_size = Some(ranks);
            })
        };
        let refused = load(&with_ranks(7)).map(drop).expect_err("seven ranks");
        let loaded = load(&with_ranks(1)).map(drop).expect_err("no weights");
        std::fs::remove_dir_all(&folder).expect("the folder goes");
        assert!(matches!(refused, StartError::Settings(_)), "{refused}");
        assert!(matches!(loaded, StartError::Model(_)), "{loaded}");
    }
}
