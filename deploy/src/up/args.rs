//! Owns the command line of `tandem up`: raw as clap reads it, then checked once into [`Settings`]. *Pure.*

use std::{path::PathBuf, time::Duration};

use super::topology::{Fleet, Split, TopologyError};

/// Start prefill and decode workers and the gateway on this machine.
///
/// Every child inherits the environment, so TANDEM_WORKER_* and TANDEM_GATEWAY_* reach the settings
/// that have no option here or are not given; see `tandem worker --help` and `tandem gateway --help`.
#[derive(clap::Args, Clone, Debug)]
pub struct UpArgs {
    /// How many workers of each role: 1p1d, 2p2d, ...; 0p0d together with --plain
    #[arg(value_name = "XpYd")]
    pub split: Split,

    /// Start N unsplit workers behind the same gateway instead; only with 0p0d [default: none]
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    pub plain: u16,

    /// A Hugging Face directory, a GGUF file, or the name smollm2, which is fetched on first use
    #[arg(long, value_name = "PATH|NAME", default_value = "smollm2")]
    pub model_path: String,

    /// The model's name in the API [default: the model path]
    #[arg(long, value_name = "NAME")]
    pub served_model_name: Option<String>,

    /// Address of the gateway; the workers always listen on 127.0.0.1
    #[arg(long, default_value = "127.0.0.1")]
    pub host: String,

    /// Port of the gateway; 0 takes a free one
    #[arg(long, default_value_t = 30000)]
    pub port: u16,

    /// Port of the gateway's metrics [default: 0, a free one]
    #[arg(long, default_value_t = 0, hide_default_value = true)]
    pub prometheus_port: u16,

    /// Tensor parallel ranks of each prefill worker [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub tp_prefill: Option<u32>,

    /// Tensor parallel ranks of each decode worker [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub tp_decode: Option<u32>,

    /// Where the workers compute [default: auto]
    #[arg(long, value_enum)]
    pub device: Option<Device>,

    /// Threads of each worker [default: this machine's cores, shared out within each role]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub threads: Option<u32>,

    /// Arithmetic of the CPU backend: exact keeps activations in f32, fast may quantise them [default: fast]
    #[arg(long, value_enum)]
    pub cpu_math: Option<CpuMath>,

    /// Longest sequence, prompt and answer together, in tokens [default: the model's]
    #[arg(long, value_name = "TOKENS")]
    pub context_length: Option<u32>,

    /// KV pool of each worker, in tokens [default: what the memory budget allows]
    #[arg(long, value_name = "TOKENS")]
    pub max_total_tokens: Option<u32>,

    /// Sequences that one worker runs at a time [default: 64]
    #[arg(long, value_name = "N")]
    pub max_running_requests: Option<u32>,

    /// Prompt tokens of one step of a worker [default: 256]
    #[arg(long, value_name = "TOKENS")]
    pub chunked_prefill_size: Option<u32>,

    /// Tokens in one KV page [default: 16]
    #[arg(long, value_name = "TOKENS")]
    pub page_size: Option<u32>,

    /// Also write each child's log to DIR/NAME.log [default: to the terminal only]
    #[arg(long, value_name = "DIR")]
    pub log_dir: Option<PathBuf>,

    /// Log level of the children: error, warn, info, debug, trace, or a filter [default: info]
    #[arg(long, value_name = "FILTER")]
    pub log_level: Option<String>,

    /// Longest wait until all children are ready
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub start_timeout_secs: u64,

    /// Write addresses and process ids there as JSON once all are ready [default: no file]
    #[arg(long, value_name = "PATH")]
    pub ready_file: Option<PathBuf>,
}

#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum Device {
    Cpu,
    Cuda,
    Auto,
}

#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum CpuMath {
    Exact,
    Fast,
}

/// What the rooms of `up` rely on: the fleet makes sense, and every number is in range.
#[derive(Clone, Debug)]
pub struct Settings {
    pub fleet: Fleet,
    pub gateway_host: String,
    pub start_timeout: Duration,
    /// `--threads` for each worker; none when the user's environment sets it.
    pub threads: Option<u32>,
    pub args: UpArgs,
}

impl Settings {
    /// `cores` of this machine are shared out among the workers of a role, unless the user chose (`threads_in_environment`).
    pub fn new(args: UpArgs, cores: usize, threads_in_environment: bool) -> Result<Self, TopologyError> {
        let fleet = Fleet::new(args.split, args.plain)?;
        let share = (cores / usize::from(fleet.workers_at_once()).max(1)).max(1);
        let threads = match args.threads {
            None if threads_in_environment => None,
            None => Some(u32::try_from(share).unwrap_or(u32::MAX)),
            chosen => chosen,
        };
        let start_timeout = Duration::from_secs(args.start_timeout_secs);
        Ok(Self { fleet, gateway_host: args.host.clone(), start_timeout, threads, args })
    }
}

#[cfg(test)]
pub(super) mod tests {
    use clap::{Args as _, Command, CommandFactory as _, Parser};
    use tandem_worker::WorkerArgs;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        up: UpArgs,
    }

    pub fn parse(words: &str) -> Result<UpArgs, clap::Error> {
        Cli::try_parse_from(["up"].into_iter().chain(words.split_whitespace())).map(|cli| cli.up)
    }

    #[test]
    fn one_argument_is_enough() {
        let args = parse("1p1d").expect("parses");
        assert_eq!((args.port, args.model_path.as_str(), args.device), (30000, "smollm2", None));
        assert_eq!((args.tp_prefill, args.tp_decode, args.plain), (None, None, 0));
    }

    #[test]
    fn a_bad_shape_is_a_usage_error_that_shows_a_good_one() {
        let error = parse("1d1p").expect_err("refused").to_string();
        assert!(error.contains("1p1d"), "{error}");
        assert!(parse("").is_err());
        assert!(parse("1p1d --tp-prefill 0").is_err());
        assert!(parse("1p1d --device tpu").is_err());
    }

    /// What the help of a flag says about the case that it is not given.
    fn stated_default(command: &Command, flag: &str) -> Option<String> {
        let arg = command.get_arguments().find(|arg| arg.get_long() == Some(flag))?;
        let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
        help.split_once("[default: ").map(|(_, stated)| stated.trim_end_matches(']').to_owned())
    }

    #[test]
    fn help_tells_what_holds_without_each_flag_and_agrees_with_the_worker() {
        let up = Cli::command();
        let worker = WorkerArgs::augment_args(Command::new("worker"));
        for arg in up.get_arguments().filter(|arg| arg.get_long().is_some()) {
            let flag = arg.get_long().unwrap_or_default();
            let shown_by_clap = !arg.get_default_values().is_empty() && !arg.is_hide_default_value_set();
            let stated = stated_default(&up, flag);
            assert!(shown_by_clap || stated.is_some(), "--{flag}");
            let of_up_itself = ["host", "port", "threads"].contains(&flag);
            if let Some(of_worker) = stated_default(&worker, flag).filter(|_| !of_up_itself) {
                assert_eq!(stated, Some(of_worker), "--{flag}");
            }
        }
    }

    #[test]
    fn cores_are_shared_out_and_the_user_comes_first() {
        let settings =
            |words: &str, cores, env| Settings::new(parse(words).expect("parses"), cores, env).expect("good");
        assert_eq!(settings("1p1d", 8, false).threads, Some(8));
        assert_eq!(settings("1p3d", 8, false).threads, Some(2));
        assert_eq!(settings("2p2d", 2, false).threads, Some(1));
        assert_eq!(settings("1p1d --threads 3", 8, true).threads, Some(3));
        assert_eq!(settings("1p1d", 8, true).threads, None);
        assert_eq!(settings("0p0d --plain 1", 2, false).threads, Some(2));
    }
}
