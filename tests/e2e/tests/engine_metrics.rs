//! `/engine_metrics` of a gateway: what real workers count, as one text that Prometheus takes.

use std::collections::BTreeSet;

use tandem_e2e::{Fleet, FleetOptions};

#[tokio::test(flavor = "multi_thread")]
async fn fleet_metrics_of_all_workers_are_one_text() {
    let fleet = Fleet::start("engine-metrics", FleetOptions::pd(1, 1)).await;
    let answer = fleet.client().get("/engine_metrics").await.expect("an answer");
    let text = answer.text();
    assert_eq!(answer.status, 200, "{text}");
    let samples = || text.lines().filter(|line| !line.starts_with('#'));
    for worker in &fleet.workers {
        let url = worker.url();
        let label = format!("worker_addr=\"{}\"", url.trim_start_matches("http://"));
        assert!(samples().any(|line| line.contains(&label)), "nothing of {label}: {text}");
    }
    assert!(samples().all(|line| line.contains("worker_addr=")), "{text}");
    let types: Vec<&str> = text.lines().filter(|line| line.starts_with("# TYPE ")).collect();
    assert!(!types.is_empty() && types.iter().collect::<BTreeSet<_>>().len() == types.len(), "a family twice: {text}");
}
