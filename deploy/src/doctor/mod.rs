//! `tandem doctor`: asks every worker and tries every pair that a gateway with these settings would use, and says what is
//! wrong, whose fault it is and what to do. `targets` finds the workers, `ask` asks them, `judge` (pure) thinks about the
//! answers, `report` prints. Changes nothing anywhere, except that each pair answers one prompt of one token.

mod ask;
mod judge;
mod report;
mod targets;

use std::{error::Error, io::Write as _, process::ExitCode, time::Duration};

use tandem_gateway::GatewayArgs;

/// Check that workers and pairs are fit to serve, and say what to do where they are not.
///
/// Takes the settings of `tandem gateway`, or asks a running one (--gateway). Ends with 0 if nothing is wrong, else with 1.
#[derive(clap::Args, Clone, Debug)]
pub struct DoctorArgs {
    /// Check the workers of this running gateway, instead of those that the settings name. It is shown
    /// --admin-api-key, else --api-key [default: none].
    #[arg(long, value_name = "URL")]
    pub gateway: Option<String>,
    /// Print one JSON object instead of text [default: text].
    #[arg(long)]
    pub json: bool,
    /// Do not send a prompt of one token through each pair; whether decode workers reach the bootstrap ports stays unknown
    /// then [default: send it].
    #[arg(long)]
    pub no_trial: bool,
    /// Each question is answered within this many seconds [default: 20].
    #[arg(long, value_name = "SECS", value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub answer_timeout_secs: Option<u64>,
    #[command(flatten)]
    pub settings: GatewayArgs,
}

pub fn run(args: DoctorArgs) -> Result<ExitCode, Box<dyn Error>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let report = runtime.block_on(examine(&args))?;
    let text = if args.json { report.json() } else { report.text() };
    // Nobody has to read it; the exit status tells, too.
    let _ = std::io::stdout().write_all(text.as_bytes());
    Ok(if report.is_well() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

async fn examine(args: &DoctorArgs) -> Result<report::Report, Box<dyn Error>> {
    let timeout = Duration::from_secs(args.answer_timeout_secs.unwrap_or(20));
    let mut settings = args.settings.clone().merged()?;
    // The gateway that is asked knows the workers; these settings need not.
    settings.fleet.enable_igw |= args.gateway.is_some();
    let operators_key = settings.security.admin_api_key.clone().or(settings.security.api_key.clone());
    let config = settings.checked()?;
    let asker = ask::Asker::new(tandem_gateway::worker_client(&config)?, timeout, config.security.api_key.as_ref())?;
    let targets = match &args.gateway {
        Some(url) => targets::of_gateway(&asker, url, operators_key.as_ref().map(|key| key.reveal())).await?,
        None => tandem_gateway::known_workers(&config).await?.into_iter().map(targets::Target::from).collect(),
    };
    let workers = asker.all(targets).await;
    let pairs = judge::pairs(&workers);
    let trials = if args.no_trial { Vec::new() } else { asker.trials(&workers, &pairs).await };
    Ok(judge::judge(workers, pairs, trials, env!("CARGO_PKG_VERSION")))
}
