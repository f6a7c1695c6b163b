//! What is tried again, with whom, and what is not.

mod support;

use serde_json::{Value, json};
use support::*;
use tandem_gateway::PolicyName;

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_pooled_connection_is_not_the_clients_problem() {
    let mut p = Worker::start("prefill", well).await;
    let d = Worker::start("decode", |got, socket| async move {
        match got.number {
            // The second prompt arrives on a connection that dies before a byte of its answer.
            1 => None,
            _ => well(got, socket).await,
        }
    })
    .await;
    let gateway = Gateway::pd(&[&p], &[&d]).await;
    assert_eq!(gateway.chat(false).await.status(), 200);
    gateway.until_idle().await;
    assert_eq!(gateway.chat(false).await.status(), 200);
    let rooms: Vec<u64> = [p.next().await, p.next().await, p.next().await].iter().map(Got::room).collect();
    assert!(rooms[1] != rooms[2], "another attempt has another room");
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_closed_while_idle_are_found_out() {
    let p = Worker::start("prefill", well).await;
    let d = Worker::start("decode", |got, socket| async move {
        well(got, socket).await;
        None
    })
    .await;
    let gateway = Gateway::pd(&[&p], &[&d]).await;
    for _ in 0..20 {
        assert_eq!(gateway.chat(false).await.status(), 200);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_side_is_named_and_served_again_as_soon_as_it_is_back() {
    let p = Worker::start("prefill", well).await;
    let d = Worker::start("decode", well).await;
    let args = with(pd_args(&[&p], &[&d]), |a| a.fleet.health_check_interval_secs = Some(600.0));
    let gateway = Gateway::start(args).await;
    gateway.until_ready().await;
    assert_eq!(gateway.chat(false).await.status(), 200);
    let address = d.kill().await;
    let answer = gateway.chat(false).await;
    assert!(answer.headers().contains_key("retry-after"));
    let (status, code, error) = error_of(answer).await;
    assert_eq!((status, code.as_str()), (503, "no_decode_worker"), "{error}");
    let told = "no healthy decode worker is available (nobody listens there); retry in a few seconds";
    assert_eq!(error["message"], told);
    let _d = Worker::start_at(address, Says::mode("decode"), well).await;
    assert_eq!(gateway.chat(false).await.status(), 200);
    gateway.until_idle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_was_starting_is_asked_again_when_needed() {
    let p = Worker::start("prefill", well).await;
    let starting = Says { health: 503, ..Says::mode("decode") };
    let d = Worker::start_at("127.0.0.1:0".parse().unwrap(), starting, well).await;
    let args = with(pd_args(&[&p], &[&d]), |a| a.fleet.health_check_interval_secs = Some(600.0));
    let gateway = Gateway::start(args).await;
    let seen = |_: u16, v: &Value| v["unhealthy"].to_string().contains("503") && v["healthy_workers"] == 1;
    gateway.until("/readiness", seen).await;
    let (status, code, error) = error_of(gateway.chat(false).await).await;
    assert_eq!((status, code.as_str()), (503, "no_decode_worker"));
    assert!(error["message"].as_str().unwrap().contains("503"));
    let address = d.kill().await;
    let _d = Worker::start_at(address, Says::mode("decode"), well).await;
    assert_eq!(gateway.chat(false).await.status(), 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unreachable_worker_costs_another_pair_only() {
    let p = Worker::start("prefill", well).await;
    let d = Worker::start("decode", well).await;
    let gone = Worker::start("decode", well).await;
    let args = with(pd_args(&[&p], &[&gone, &d]), |a| a.pair.policy = Some(PolicyName::RoundRobin));
    let gateway = Gateway::start(args).await;
    gateway.until("/readiness", |_, v| v["healthy_workers"] == 3).await;
    gone.kill().await;
    for _ in 0..6 {
        assert_eq!(gateway.chat(false).await.status(), 200);
    }
}

/// Two of them: one always answers with this status, the other serves.
async fn trouble(status: u16) -> (Worker, Worker) {
    let body = r#"{"error":{"message":"pool full"}}"#;
    let troubled = Worker::start("decode", move |_, socket| say(socket, json_answer(status, body))).await;
    (troubled, Worker::start("decode", well).await)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_in_trouble_costs_another_pair_with_new_rooms() {
    for status in [502, 503, 504] {
        let mut p = Worker::start("prefill", well).await;
        let (mut troubled, mut d) = trouble(status).await;
        let args = with(pd_args(&[&p], &[&troubled, &d]), |a| {
            a.pair.policy = Some(PolicyName::RoundRobin);
            a.deadlines.prefill_verdict_ms = Some(0);
        });
        let gateway = Gateway::start(args).await;
        gateway.until("/readiness", |_, v| v["healthy_workers"] == 3).await;
        for _ in 0..2 {
            assert_eq!(gateway.chat(false).await.status(), 200);
        }
        let rooms = [troubled.next().await.room(), d.next().await.room(), d.next().await.room()];
        assert!(rooms[0] != rooms[1] && rooms[1] != rooms[2], "{rooms:?}");
        assert_eq!([p.next().await.room(), p.next().await.room(), p.next().await.room()].len(), 3);
        assert!(gateway.metrics().await.contains("smg_worker_retries_total{endpoint=\"chat\"}"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_clients_mistakes_and_a_full_worker_are_not_tried_again() {
    for status in [400, 404, 413, 422, 429, 500] {
        let p = Worker::start("prefill", well).await;
        let (mut troubled, mut d) = trouble(status).await;
        let args = with(pd_args(&[&p], &[&troubled, &d]), |a| a.pair.policy = Some(PolicyName::RoundRobin));
        let gateway = Gateway::start(args).await;
        gateway.until("/readiness", |_, v| v["healthy_workers"] == 3).await;
        let mut statuses = [gateway.chat(false).await.status().as_u16(), gateway.chat(false).await.status().as_u16()];
        statuses.sort();
        assert_eq!(statuses, [200, status]);
        troubled.next().await;
        d.next().await;
        assert!(troubled.got.try_recv().is_err() && d.got.try_recv().is_err());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn when_tries_are_spent_the_workers_own_word_is_the_answer() {
    let p = Worker::start("prefill", well).await;
    let (mut troubled, _d) = trouble(503).await;
    for (disabled, tries) in [(false, 3), (true, 1)] {
        let args = with(pd_args(&[&p], &[&troubled]), |a| {
            a.retry.retry_max_retries = Some(2);
            a.retry.retry_initial_backoff_ms = Some(1);
            a.retry.disable_retries = disabled;
            a.fleet.disable_circuit_breaker = true;
        });
        let gateway = Gateway::start(args).await;
        gateway.until_ready().await;
        let (status, code, error) = error_of(gateway.chat(true).await).await;
        assert_eq!((status, code.as_str(), &error["message"]), (503, "decode_refused", &json!("pool full")));
        let mut rooms = std::collections::HashSet::new();
        for _ in 0..tries {
            rooms.insert(troubled.next().await.room());
        }
        assert!(rooms.len() == tries && troubled.got.try_recv().is_err());
        assert!(gateway.metrics().await.contains("smg_worker_retries_exhausted_total{endpoint=\"chat\"} 1"));
    }
}
