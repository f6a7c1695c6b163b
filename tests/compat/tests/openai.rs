//! The `openai` package behind our gateway: answers whole and streamed, errors as its typed exceptions.

use std::time::Duration;

use tandem_compat::openai_client;
use tandem_e2e::process::Process;
use tandem_e2e::{Fleet, FleetOptions, Role, wait};

const KEY: &str = "sk-compat";
/// A scenario with the import of the package, on a busy machine.
const LIMIT: Duration = Duration::from_secs(60);

fn assert_passes(mut client: Process) {
    let status = client.wait(LIMIT);
    assert!(status.success(), "{status}\n{}", client.log_tail());
    println!("{}", client.log());
}

async fn until_logged(client: &Process, mark: &str) {
    wait::until(mark, LIMIT, || async { if client.log().contains(mark) { Ok(()) } else { Err(client.log_tail()) } })
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn fleet_openai_client_is_served_and_told() {
    let gateway = format!("--api-key {KEY} --max-payload-size 100000");
    let mut fleet = Fleet::start("openai", FleetOptions::pd(1, 1).gateway_args(&gateway)).await;
    assert_passes(openai_client(&fleet, "answers", KEY));
    assert_passes(openai_client(&fleet, "errors", KEY));
    let client = openai_client(&fleet, "broken-stream", KEY);
    until_logged(&client, "streaming").await;
    fleet.first(Role::Decode).kill();
    assert_passes(client);
    assert_passes(openai_client(&fleet, "no-worker", KEY));
    fleet.revive(Role::Decode).await;
    assert_passes(openai_client(&fleet, "answers", KEY));
}
