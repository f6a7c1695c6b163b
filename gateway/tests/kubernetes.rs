//! Discovery among pods, against a scripted API: in each script the fleet converges to what the API holds.

mod support;

use serde_json::{Value, json};
use support::cluster::{Cluster, Cut, Gone, pod};
use support::*;
use tandem_gateway::GatewayArgs;

/// A gateway that knows no worker but the pods.
fn args(cluster: &Cluster) -> GatewayArgs {
    with(GatewayArgs::default(), |a| {
        a.discovery.service_discovery = true;
        a.discovery.service_discovery_api_url = Some(cluster.url());
        a.discovery.service_discovery_namespace = Some("serving".into());
        a.discovery.service_discovery_port = Some(30000);
        a.discovery.prefill_selector = vec!["app=llm".into(), "role=p".into()];
        a.discovery.decode_selector = vec!["app=llm,role=d".into()];
    })
}

async fn start(pods: &[Value]) -> (Cluster, Gateway) {
    let cluster = Cluster::start().await;
    pods.iter().for_each(|pod| cluster.put(pod.clone()));
    let gateway = Gateway::start(args(&cluster)).await;
    (cluster, gateway)
}

/// The fleet is these, as `p 127.0.1.1` or `d 127.0.1.2`.
async fn until(gateway: &Gateway, expected: &[&str]) {
    let seen = |value: &Value| {
        let list = value["workers"].as_array().cloned().unwrap_or_default();
        let mut shown: Vec<_> = list
            .iter()
            .map(|worker| {
                let ip =
                    worker["url"].as_str().unwrap().trim_start_matches("http://").trim_end_matches(":30000").to_owned();
                format!("{} {ip}", &worker["worker_type"].as_str().unwrap()[..1])
            })
            .collect();
        shown.sort();
        shown
    };
    let mut expected = expected.to_vec();
    expected.sort_unstable();
    gateway.until("/workers", |_, value| seen(value) == expected).await;
}

const P: &str = "p 127.0.1.1";
const D: &str = "d 127.0.1.2";

fn p() -> Value {
    pod("prefill-0", "p", "127.0.1.1")
}

fn d() -> Value {
    pod("decode-0", "d", "127.0.1.2")
}

/// One watch runs, and the fleet is the first pair.
async fn pair() -> (Cluster, Gateway) {
    let (cluster, gateway) = start(&[p(), d()]).await;
    until(&gateway, &[P, D]).await;
    cluster.until("a watch", |c| c.asked().1 == 1).await;
    (cluster, gateway)
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_come_change_and_go() {
    let (cluster, gateway) = start(&[p(), pod("stranger", "web", "127.0.1.9")]).await;
    until(&gateway, &[P]).await;
    assert_eq!(cluster.selectors()[0], "app=llm,role in (d,p)", "the API filters for us");
    cluster.put(d());
    until(&gateway, &[P, D]).await;
    // Another address, as after a restart of the sandbox.
    cluster.change("prefill-0", "/status/podIP", json!("127.0.1.7"));
    until(&gateway, &["p 127.0.1.7", D]).await;
    // Not ready, and ready again.
    cluster.change("prefill-0", "/status/conditions/0/status", json!("False"));
    until(&gateway, &[D]).await;
    cluster.change("prefill-0", "/status/conditions/0/status", json!("True"));
    until(&gateway, &["p 127.0.1.7", D]).await;
    // Other labels: another role, none, and back.
    cluster.change("prefill-0", "/metadata/labels/role", json!("d"));
    until(&gateway, &["d 127.0.1.7", D]).await;
    cluster.change("prefill-0", "/metadata/labels/role", json!("spare"));
    until(&gateway, &[D]).await;
    cluster.change("prefill-0", "/metadata/labels/role", json!("p"));
    until(&gateway, &["p 127.0.1.7", D]).await;
    // Told to stop, then gone.
    let mut leaving = d();
    leaving["metadata"]["deletionTimestamp"] = json!("2026-12-01T00:00:00Z");
    cluster.put(leaving);
    until(&gateway, &["p 127.0.1.7"]).await;
    cluster.delete("decode-0");
    cluster.put(d());
    until(&gateway, &["p 127.0.1.7", D]).await;
    assert_eq!(cluster.asked().0, 1, "all of it by one list and one watch");
    let metrics = gateway.metrics().await;
    assert!(metrics.contains("smg_discovery_workers_discovered{source=\"kubernetes\"} 2"), "{metrics}");
    assert!(metrics.contains("tandem_gateway_discovery_in_sync{source=\"kubernetes\"} 1"), "{metrics}");
    assert!(
        metrics.contains("smg_discovery_deregistrations_total{reason=\"removed\",source=\"kubernetes\"}"),
        "{metrics}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_deleted_while_no_stream_runs_does_not_stay() {
    for cut in [Cut::Cleanly, Cut::Off, Cut::InMidLine] {
        let (cluster, gateway) = pair().await;
        // No watch is told: the stream is silent, the history is forgotten, and only then the stream is cut.
        cluster.mute(true);
        cluster.delete("prefill-0");
        cluster.put(pod("prefill-1", "p", "127.0.1.3"));
        cluster.forget(Gone::AsStatus);
        cluster.mute(false);
        cluster.cut(cut);
        until(&gateway, &["p 127.0.1.3", D]).await;
        // And what comes after it arrives.
        cluster.delete("decode-0");
        until(&gateway, &["p 127.0.1.3"]).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_version_that_is_gone_is_followed_by_a_list() {
    let (cluster, gateway) = pair().await;
    for gone in [Gone::AsStatus, Gone::AsEvent] {
        let before = cluster.asked();
        // The stream is cut by a restart of the API, which has forgotten everything between the list and the watch.
        cluster.refuse(Some(503));
        cluster.cut(Cut::Off);
        cluster.until("a refused list", |c| c.asked().0 > before.0).await;
        cluster.change("decode-0", "/status/podIP", json!("127.0.1.8"));
        cluster.refuse(None);
        until(&gateway, &[P, "d 127.0.1.8"]).await;
        cluster.until("a watch after it", |c| c.asked().1 > before.1).await;
        cluster.mute(true);
        cluster.change("decode-0", "/status/podIP", json!("127.0.1.2"));
        cluster.forget(gone);
        cluster.mute(false);
        cluster.cut(Cut::Off);
        until(&gateway, &[P, D]).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn bookmarks_pass_and_change_nothing() {
    let (cluster, gateway) = pair().await;
    for _ in 0..3 {
        cluster.bookmark();
    }
    cluster.put(pod("decode-1", "d", "127.0.1.4"));
    until(&gateway, &[P, D, "d 127.0.1.4"]).await;
    cluster.bookmark();
    cluster.forget(Gone::AsStatus);
    cluster.delete("decode-1");
    until(&gateway, &[P, D]).await;
    assert_eq!(cluster.asked(), (1, 1, 0), "one list, one watch");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_says_nothing_is_made_good_by_the_next_list() {
    let cluster = Cluster::start().await;
    cluster.put(p());
    cluster.put(d());
    let gateway = Gateway::start(with(args(&cluster), |a| a.discovery.service_discovery_relist_secs = Some(2))).await;
    until(&gateway, &[P, D]).await;
    cluster.mute(true);
    cluster.delete("prefill-0");
    until(&gateway, &[D]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_api_that_fails_keeps_the_fleet_and_is_asked_again() {
    let (cluster, gateway) = pair().await;
    cluster.refuse(Some(403));
    cluster.cut(Cut::Off);
    let lists = cluster.asked().0;
    cluster.until("two refused lists", |c| c.asked().0 >= lists + 2).await;
    until(&gateway, &[P, D]).await;
    let metrics = gateway.metrics().await;
    assert!(metrics.contains("tandem_gateway_discovery_in_sync{source=\"kubernetes\"} 0"), "{metrics}");
    cluster.put(pod("decode-1", "d", "127.0.1.4"));
    cluster.refuse(None);
    until(&gateway, &[P, D, "d 127.0.1.4"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_api_that_comes_later_than_the_gateway() {
    let cluster = Cluster::start().await;
    cluster.refuse(Some(500));
    cluster.put(p());
    let gateway = Gateway::start(args(&cluster)).await;
    cluster.until("two refused lists", |c| c.asked().0 >= 2).await;
    until(&gateway, &[]).await;
    cluster.refuse(None);
    until(&gateway, &[P]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_long_list_comes_in_pages() {
    let mut pods: Vec<Value> = (0..1100).map(|i| pod(&format!("a-{i:04}"), "d", "127.0.1.5")).collect();
    pods.iter_mut().for_each(|pod| pod["status"]["phase"] = json!("Pending"));
    pods.push(pod("z", "p", "127.0.1.1"));
    let (cluster, gateway) = start(&pods).await;
    until(&gateway, &[P]).await;
    assert_eq!(cluster.asked().0, 3, "pages of 500");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_annotation_leaves_out_its_pod_only() {
    let mut wrong = pod("prefill-1", "p", "127.0.1.3");
    wrong["metadata"]["annotations"]["sglang.ai/bootstrap-port"] = json!("http");
    let (cluster, gateway) = start(&[p(), wrong, d()]).await;
    until(&gateway, &[P, D]).await;
    cluster.change("prefill-1", "/metadata/annotations/sglang.ai~1bootstrap-port", json!("8999"));
    until(&gateway, &[P, D, "p 127.0.1.3"]).await;
    let workers = gateway.until("/workers", |_, _| true).await;
    let list = workers["workers"].as_array().unwrap();
    let port = list.iter().find(|w| w["url"] == "http://127.0.1.3:30000").unwrap()["bootstrap_port"].clone();
    assert_eq!(port, 8999);
}

/// Requests are served by pods that were found.
#[tokio::test(flavor = "multi_thread")]
async fn requests_reach_the_pods() {
    let prefill = Worker::start("prefill", well).await;
    let decode = Worker::start("decode", well).await;
    let at = |name: &str, role: &str, worker: &Worker| {
        let mut pod = pod(name, role, "127.0.0.1");
        pod["metadata"]["annotations"]["tandem/port"] = json!(worker.address.port().to_string());
        pod
    };
    let (_cluster, gateway) = start(&[at("prefill-0", "p", &prefill), at("decode-0", "d", &decode)]).await;
    gateway.until_ready().await;
    let answer = gateway.chat(false).await;
    assert_eq!(answer.status(), 200, "{}", answer.text().await.unwrap());
}
