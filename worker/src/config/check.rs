//! From raw settings to checked ones, in two steps: what can be judged alone ([`Settings::check`]), before minutes of
//! loading; and what needs the model's shape ([`Settings::engine`]). *Pure.*

use tandem_handoff::wire::{CHECKSUMS_MAX, transfer::Backend};

use super::{CpuMath, EngineConfig, HandoffConfig, HttpConfig, Role, WorkerArgs, args::Device};
use crate::error::StartError;

/// The pool's memory budget unless set: a share of the available memory, and no more than this.
const KV_MEMORY_MIB_DEFAULT_MAX: u64 = 4096;
const KV_MEMORY_SHARE: u64 = 8;
/// The share of the pool's pages that may be in quarantine unless set.
const QUARANTINE_SHARE: u32 = 4;
const PAGE_SIZE_MAX: u32 = 1024;
/// Token positions are counted in 32 bits everywhere, with room to add.
const TOTAL_TOKENS_MAX: u64 = 1 << 30;

/// Settings that were judged without the model.
#[derive(Clone, Debug)]
pub struct Settings {
    pub model_path: String,
    pub served_model_name: String,
    pub role: Role,
    pub http: HttpConfig,
    pub handoff: HandoffConfig,
    pub cpu_math: CpuMath,
    pub threads: usize,
    /// Flags that were given and do nothing in this role.
    pub idle_flags: Vec<&'static str>,
    limits: Limits,
}

#[derive(Clone, Debug)]
struct Limits {
    page_size: u32,
    chunked_prefill_size: u32,
    max_running_requests: u32,
    queue_requests_max: u32,
    max_total_tokens: Option<u32>,
    kv_memory_mib: Option<u64>,
    context_length: Option<u32>,
    num_reserved_decode_tokens: u32,
    quarantine_pages_max: Option<u32>,
    tp_size: u32,
}

/// What the limits depend on.
#[derive(Clone, Copy, Debug)]
pub struct ModelFacts {
    pub max_positions: usize,
    pub kv_heads: usize,
    pub heads: usize,
    /// KV bytes of one token over all heads and layers.
    pub bytes_per_token: usize,
    /// Memory of this machine that is free for use now.
    pub available_bytes: u64,
}

impl Settings {
    /// `cores` is what this machine offers.
    pub fn check(args: &WorkerArgs, cores: usize) -> Result<Settings, StartError> {
        let model_path = args
            .model_path
            .clone()
            .filter(|path| !path.is_empty())
            .ok_or_else(|| refuse("--model-path is missing: a Hugging Face directory, a GGUF file, or smollm2"))?;
        check_device(args)?;
        let role = args.disaggregation_mode.unwrap_or(Role::Null);
        let threads = args.threads.unwrap_or(cores);
        require((1..=1024).contains(&threads), || format!("--threads {threads} is not between 1 and 1024"))?;
        if args.api_key.as_deref().is_some_and(|key| key.is_empty() || !key.is_ascii()) {
            return Err(refuse("--api-key must be ASCII text and not empty"));
        }
        let served = args.served_model_name.clone().unwrap_or_else(|| model_path.clone());
        require(!served.is_empty(), || "--served-model-name is empty".into())?;
        let host = args.host.clone().unwrap_or_else(|| "127.0.0.1".into());
        Ok(Settings {
            served_model_name: served,
            idle_flags: idle_flags(args, role),
            role,
            handoff: check_handoff(args, &host)?,
            http: check_http(args, host)?,
            cpu_math: args.cpu_math.unwrap_or(CpuMath::Fast),
            threads,
            limits: check_limits(args)?,
            model_path,
        })
    }

    /// True when decode workers of this host may map this worker's KV pools.
    pub fn shares_pools(&self) -> bool {
        self.role == Role::Prefill && self.handoff.transfer_backend != Backend::Tcp
    }

    pub fn tp_size(&self) -> u32 {
        self.limits.tp_size
    }

    pub fn page_size(&self) -> u32 {
        self.limits.page_size
    }

    /// The limits that fit this model on this machine.
    pub fn engine(&self, model: &ModelFacts) -> Result<EngineConfig, StartError> {
        let limits = &self.limits;
        let tp = limits.tp_size as usize;
        require(model.heads.is_multiple_of(tp), || {
            format!("--tp-size {tp} does not divide the model's {} attention heads", model.heads)
        })?;
        require(model.kv_heads.is_multiple_of(tp) || tp.is_multiple_of(model.kv_heads), || {
            format!("--tp-size {tp} neither divides the model's {} KV heads nor is a multiple of them", model.kv_heads)
        })?;
        let positions = u32::try_from(model.max_positions).unwrap_or(u32::MAX).min(TOTAL_TOKENS_MAX as u32);
        let context_length = limits.context_length.unwrap_or(positions);
        require((2..=positions).contains(&context_length), || {
            format!("--context-length {context_length} is not between 2 and the model's {positions} positions")
        })?;
        let max_total_tokens = match limits.max_total_tokens {
            Some(tokens) => tokens,
            None => self.tokens_in_budget(model, context_length)?,
        };
        self.checksums_fit(model.kv_heads, context_length.min(max_total_tokens))?;
        let pages = max_total_tokens / limits.page_size;
        let quarantine_pages_max = limits.quarantine_pages_max.unwrap_or(pages / QUARANTINE_SHARE);
        require(quarantine_pages_max <= pages, || {
            format!(
                "--quarantine-pages-max {quarantine_pages_max} is more than the {pages} pages of the KV pool; {pages} is \
                 never passed"
            )
        })?;
        Ok(EngineConfig {
            role: self.role,
            page_size: limits.page_size,
            chunked_prefill_size: limits.chunked_prefill_size,
            max_running_requests: limits.max_running_requests,
            queue_requests_max: limits.queue_requests_max,
            max_total_tokens,
            context_length,
            num_reserved_decode_tokens: limits.num_reserved_decode_tokens,
            quarantine_pages_max,
            tp_size: limits.tp_size,
            cpu_math: self.cpu_math,
            threads: self.threads,
        })
    }

    /// The checksums of the longest prompt travel in one frame.
    fn checksums_fit(&self, kv_heads: usize, prompt_tokens_max: u32) -> Result<(), StartError> {
        let page_size = self.limits.page_size;
        let checksums = prompt_tokens_max.div_ceil(page_size) as usize * kv_heads;
        let asked = self.role == Role::Decode && self.handoff.kv_checksum;
        require(!asked || checksums <= CHECKSUMS_MAX, || {
            format!(
                "--enable-kv-checksum: a prompt of {prompt_tokens_max} tokens in pages of {page_size} has {checksums} checksums \
                 ({kv_heads} KV heads), {CHECKSUMS_MAX} is the most: set a smaller --context-length or a larger --page-size"
            )
        })
    }

    /// Whole pages within the memory budget; never more than all running requests could fill.
    fn tokens_in_budget(&self, model: &ModelFacts, context_length: u32) -> Result<u32, StartError> {
        let limits = &self.limits;
        let page = u64::from(limits.page_size);
        let budget_mib = limits
            .kv_memory_mib
            .unwrap_or_else(|| ((model.available_bytes / KV_MEMORY_SHARE) >> 20).min(KV_MEMORY_MIB_DEFAULT_MAX));
        let fits = (budget_mib << 20) / model.bytes_per_token.max(1) as u64 / page * page;
        let useful = u64::from(limits.max_running_requests) * u64::from(context_length.next_multiple_of(page as u32));
        require(fits >= page, || {
            format!(
                "a KV budget of {budget_mib} MiB holds no page of {page} tokens ({} bytes per token): raise \
                 --kv-memory-mib or set --max-total-tokens",
                model.bytes_per_token
            )
        })?;
        Ok(fits.min(useful).min(TOTAL_TOKENS_MAX) as u32)
    }
}

fn check_device(args: &WorkerArgs) -> Result<(), StartError> {
    if args.device == Some(Device::Cuda) {
        return Err(refuse("--device cuda: this build has no CUDA engine; use --device cpu or auto"));
    }
    Ok(())
}

fn transfer_backend(args: &WorkerArgs) -> Result<Backend, StartError> {
    let Some(wanted) = args.disaggregation_transfer_backend.as_deref() else {
        return Ok(Backend::Auto);
    };
    let names = Backend::ALL.map(Backend::name).join(", ");
    require(!wanted.is_empty(), || format!("--disaggregation-transfer-backend is empty; it is one of {names}"))?;
    Backend::ALL.into_iter().find(|backend| backend.name() == wanted).ok_or_else(|| {
        refuse(&format!("--disaggregation-transfer-backend {wanted} is not in this build; it has {names}"))
    })
}

/// What was asked for in vain, so that nobody relies on it.
fn idle_flags(args: &WorkerArgs, role: Role) -> Vec<&'static str> {
    let no_handoff = role == Role::Null;
    let flags = [
        ("--enable-kv-checksum", args.enable_kv_checksum && role != Role::Decode),
        ("--disaggregation-transfer-backend", args.disaggregation_transfer_backend.is_some() && no_handoff),
        ("--quarantine-pages-max", args.quarantine_pages_max.is_some() && no_handoff),
    ];
    flags.into_iter().filter_map(|(flag, idle)| idle.then_some(flag)).collect()
}

fn check_limits(args: &WorkerArgs) -> Result<Limits, StartError> {
    let page_size = args.page_size.unwrap_or(16);
    require(page_size.is_power_of_two() && page_size <= PAGE_SIZE_MAX, || {
        format!("--page-size {page_size} is not a power of two up to {PAGE_SIZE_MAX}")
    })?;
    let chunked_prefill_size = args.chunked_prefill_size.unwrap_or(page_size.max(256));
    require(chunked_prefill_size > 0 && chunked_prefill_size.is_multiple_of(page_size), || {
        format!("--chunked-prefill-size {chunked_prefill_size} is not a multiple of --page-size {page_size}")
    })?;
    let max_running_requests = args.max_running_requests.unwrap_or(64);
    require((1..=65_536).contains(&max_running_requests), || {
        format!("--max-running-requests {max_running_requests} is not between 1 and 65536")
    })?;
    let queue_requests_max = args.max_queued_requests.unwrap_or(1024);
    require((1..=1_000_000).contains(&queue_requests_max), || {
        format!("--max-queued-requests {queue_requests_max} is not between 1 and 1000000")
    })?;
    if let Some(tokens) = args.max_total_tokens {
        require(tokens >= page_size && u64::from(tokens) <= TOTAL_TOKENS_MAX, || {
            format!("--max-total-tokens {tokens} is not between one page ({page_size}) and {TOTAL_TOKENS_MAX}")
        })?;
    }
    if let Some(mib) = args.kv_memory_mib {
        require((1..=1 << 24).contains(&mib), || format!("--kv-memory-mib {mib} is not between 1 and {}", 1 << 24))?;
    }
    let num_reserved_decode_tokens = args.num_reserved_decode_tokens.unwrap_or(128);
    require(u64::from(num_reserved_decode_tokens) <= TOTAL_TOKENS_MAX, || {
        format!("--num-reserved-decode-tokens {num_reserved_decode_tokens} is over {TOTAL_TOKENS_MAX}")
    })?;
    let tp_size = args.tp_size.unwrap_or(1);
    require((1..=256).contains(&tp_size), || format!("--tp-size {tp_size} is not between 1 and 256"))?;
    Ok(Limits {
        page_size,
        chunked_prefill_size,
        max_running_requests,
        queue_requests_max,
        max_total_tokens: args.max_total_tokens,
        kv_memory_mib: args.kv_memory_mib,
        context_length: args.context_length,
        num_reserved_decode_tokens,
        quarantine_pages_max: args.quarantine_pages_max,
        tp_size,
    })
}

fn check_handoff(args: &WorkerArgs, host: &str) -> Result<HandoffConfig, StartError> {
    let heartbeat_max_failure = args.heartbeat_max_failure.unwrap_or(2);
    require(heartbeat_max_failure >= 1, || "--heartbeat-max-failure 0 would lose every peer at once".into())?;
    Ok(HandoffConfig {
        bootstrap_timeout_ms: wait("--bootstrap-timeout-ms", args.bootstrap_timeout_ms, 300_000)?,
        waiting_timeout_ms: wait("--waiting-timeout-ms", args.waiting_timeout_ms, 300_000)?,
        heartbeat_interval_ms: wait("--heartbeat-interval-ms", args.heartbeat_interval_ms, 5_000)?,
        heartbeat_max_failure,
        key_file: args.handoff_key_file.clone(),
        kv_checksum: args.enable_kv_checksum,
        transfer_backend: transfer_backend(args)?,
        bootstrap_host: host.into(),
        bootstrap_port: args.disaggregation_bootstrap_port.unwrap_or(8998),
    })
}

fn check_http(args: &WorkerArgs, host: String) -> Result<HttpConfig, StartError> {
    let body_bytes_max = args.max_body_bytes.unwrap_or(32 << 20);
    require((1024..=1 << 32).contains(&body_bytes_max), || {
        format!("--max-body-bytes {body_bytes_max} is not between 1024 and {}", 1u64 << 32)
    })?;
    let connections_max = args.connections_max();
    require((1..=1 << 20).contains(&connections_max), || {
        format!("--max-connections {connections_max} is not between 1 and {}", 1 << 20)
    })?;
    Ok(HttpConfig {
        host,
        port: args.port.unwrap_or(30_000),
        api_key: args.api_key.clone(),
        body_bytes_max,
        header_timeout_ms: wait("--header-timeout-ms", args.header_timeout_ms, 30_000)?,
        body_timeout_ms: wait("--body-timeout-ms", args.body_timeout_ms, 60_000)?,
        connections_max,
        shutdown_grace_ms: args.shutdown_grace_ms.unwrap_or(10_000).min(WAIT_MS_MAX),
    })
}

const WAIT_MS_MAX: u64 = 24 * 3600 * 1000;

fn wait(flag: &str, value: Option<u64>, default: u64) -> Result<u64, StartError> {
    let ms = value.unwrap_or(default);
    require((1..=WAIT_MS_MAX).contains(&ms), || format!("{flag} {ms} is not between 1 and {WAIT_MS_MAX}"))?;
    Ok(ms)
}

fn require(holds: bool, message: impl FnOnce() -> String) -> Result<(), StartError> {
    if holds { Ok(()) } else { Err(StartError::Settings(message())) }
}

fn refuse(message: &str) -> StartError {
    StartError::Settings(message.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args() -> WorkerArgs {
        WorkerArgs { model_path: Some("smollm2".into()), ..WorkerArgs::default() }
    }

    fn facts() -> ModelFacts {
        ModelFacts { max_positions: 2048, kv_heads: 3, heads: 9, bytes_per_token: 46_080, available_bytes: 8 << 30 }
    }

    fn refusal(args: WorkerArgs) -> String {
        Settings::check(&args, 2).and_then(|s| s.engine(&facts()).map(|_| s)).unwrap_err().to_string()
    }

    #[test]
    fn defaults_serve_a_model() {
        let settings = Settings::check(&args(), 2).unwrap();
        assert_eq!((settings.served_model_name.as_str(), settings.threads), ("smollm2", 2));
        let engine = settings.engine(&facts()).unwrap();
        assert_eq!((engine.page_size, engine.context_length), (16, 2048));
        assert_eq!(engine.max_total_tokens, (1u32 << 30) / 46_080 / 16 * 16, "an eighth of 8 GiB, in whole pages");
        assert_eq!(engine.quarantine_pages_max, engine.max_total_tokens / 16 / 4);
    }

    #[test]
    fn a_budget_never_exceeds_what_requests_can_fill() {
        let settings = Settings::check(&WorkerArgs { max_running_requests: Some(2), ..args() }, 2).unwrap();
        assert_eq!(settings.engine(&facts()).unwrap().max_total_tokens, 4096);
    }

    #[test]
    fn every_refusal_names_the_flag() {
        type Change = fn(&mut WorkerArgs);
        let cases: [(&str, Change); 14] = [
            ("--model-path", |a| a.model_path = None),
            ("no CUDA engine", |a| a.device = Some(Device::Cuda)),
            ("transfer-backend mooncake", |a| a.disaggregation_transfer_backend = Some("mooncake".into())),
            ("transfer-backend is empty; it is one of", |a| a.disaggregation_transfer_backend = Some(String::new())),
            ("--quarantine-pages-max 129 is more than the 128 pages", |a| {
                (a.max_total_tokens, a.quarantine_pages_max) = (Some(2048), Some(129));
            }),
            ("--page-size 24", |a| a.page_size = Some(24)),
            ("--chunked-prefill-size 100", |a| a.chunked_prefill_size = Some(100)),
            ("--tp-size 2 does not divide", |a| a.tp_size = Some(2)),
            ("--context-length 4096", |a| a.context_length = Some(4096)),
            ("--max-total-tokens 3", |a| a.max_total_tokens = Some(3)),
            ("--threads 0", |a| a.threads = Some(0)),
            ("--heartbeat-max-failure", |a| a.heartbeat_max_failure = Some(0)),
            ("--bootstrap-timeout-ms 0", |a| a.bootstrap_timeout_ms = Some(0)),
            ("--max-body-bytes 7", |a| a.max_body_bytes = Some(7)),
        ];
        for (part, change) in cases {
            let mut args = args();
            change(&mut args);
            let message = refusal(args);
            assert!(message.contains(part), "{message:?} lacks {part:?}");
        }
    }

    #[test]
    fn a_quarantine_limit_may_be_the_whole_pool() {
        let args = WorkerArgs { max_total_tokens: Some(2048), quarantine_pages_max: Some(128), ..args() };
        let engine = Settings::check(&args, 2).unwrap().engine(&facts()).unwrap();
        assert_eq!(engine.quarantine_pages_max, 128);
    }

    #[test]
    fn flags_that_do_nothing_in_a_role_are_found() {
        let idle = |role| {
            let args = WorkerArgs {
                disaggregation_mode: Some(role),
                disaggregation_transfer_backend: Some("shm".into()),
                enable_kv_checksum: true,
                quarantine_pages_max: Some(1),
                ..args()
            };
            Settings::check(&args, 2).unwrap().idle_flags
        };
        let all = ["--enable-kv-checksum", "--disaggregation-transfer-backend", "--quarantine-pages-max"];
        assert_eq!(idle(Role::Null), all);
        assert_eq!(idle(Role::Prefill), all[..1]);
        assert_eq!(idle(Role::Decode), all[..0]);
        assert_eq!(Settings::check(&args(), 2).unwrap().idle_flags, all[..0]);
    }

    #[test]
    fn checksums_that_no_frame_holds_are_refused_on_the_worker_that_asks_for_them() {
        let long = ModelFacts { max_positions: 1 << 20, kv_heads: 4, heads: 8, ..facts() };
        let start = |role, enable_kv_checksum, context_length| {
            let disaggregation_mode = Some(role);
            let max_total_tokens = Some(1 << 20);
            let args =
                WorkerArgs { disaggregation_mode, enable_kv_checksum, context_length, max_total_tokens, ..args() };
            Settings::check(&args, 2).unwrap().engine(&long).map(|_| ()).map_err(|error| error.to_string())
        };
        let refused = start(Role::Decode, true, None).unwrap_err();
        for part in ["--enable-kv-checksum", "262144 checksums", "200000", "--context-length", "--page-size"] {
            assert!(refused.contains(part), "{refused}");
        }
        assert_eq!(start(Role::Decode, true, Some(800_000)), Ok(()));
        assert_eq!(start(Role::Decode, false, None), Ok(()));
        assert_eq!(start(Role::Prefill, true, None), Ok(()));
    }

    #[test]
    fn a_file_lies_below_flags_and_its_typos_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("worker.toml");
        std::fs::write(&path, "model_path = \"from-file\"\nport = 4\napi_key = 12345\nenable_kv_checksum = true\n")
            .unwrap();
        let merged =
            WorkerArgs { config: Some(path.clone()), port: Some(5), ..WorkerArgs::default() }.merged().unwrap();
        assert_eq!(merged.model_path.as_deref(), Some("from-file"));
        assert_eq!((merged.port, merged.api_key.as_deref()), (Some(5), Some("12345")));
        assert!(merged.enable_kv_checksum, "a flag that is not given hides no line of the file");
        std::fs::write(&path, "modle_path = \"x\"\n").unwrap();
        let error = WorkerArgs { config: Some(path), ..WorkerArgs::default() }.merged().err().unwrap().to_string();
        assert!(error.contains("modle_path"), "{error}");
    }
}
