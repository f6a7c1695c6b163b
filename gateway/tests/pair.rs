//! Policies behind a whole gateway: what they need of a request reaches them.

mod support;

use std::collections::HashSet;

use serde_json::json;
use support::*;
use tandem_gateway::PolicyName;

/// Which of two decode workers got each of `sessions`, by its number.
async fn placed(policy: PolicyName, sessions: &[(&'static str, &str)]) -> Vec<usize> {
    let p = Worker::start("prefill", well).await;
    let (mut a, mut b) = (Worker::start("decode", well).await, Worker::start("decode", well).await);
    let gateway = Gateway::start(with(pd_args(&[&p], &[&a, &b]), |args| args.pair.decode_policy = Some(policy))).await;
    gateway.until("/readiness", |_, said| said["healthy_workers"] == 3).await;
    let mut places = Vec::new();
    for (header, session) in sessions {
        let request = gateway.client.post(gateway.url("/v1/chat/completions")).header(*header, *session);
        let answer = request.body(r#"{"messages":[]}"#).send().await.unwrap();
        assert_eq!(answer.status(), 200);
        places.push(tokio::select! {
            _ = a.next() => 0,
            _ = b.next() => 1,
        });
    }
    places
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_stays_at_its_worker() {
    for policy in [PolicyName::Manual, PolicyName::ConsistentHashing] {
        for header in ["x-smg-routing-key", "x-session-id"] {
            let places = placed(policy, &[(header, "one"); 12]).await;
            assert_eq!(places.iter().collect::<HashSet<_>>().len(), 1, "{policy:?} {header}: {places:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_spread() {
    let names: Vec<String> = (0..32).map(|n| n.to_string()).collect();
    let sessions: Vec<_> = names.iter().map(|name| ("x-smg-routing-key", name.as_str())).collect();
    for policy in [PolicyName::Manual, PolicyName::ConsistentHashing] {
        let places = placed(policy, &sessions).await;
        assert_eq!(places.iter().collect::<HashSet<_>>().len(), 2, "{policy:?}: {places:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_session_is_the_header_before_the_body_and_metrics_say_what_was_done() {
    let mut p = Worker::start("prefill", well).await;
    let d = Worker::start("decode", well).await;
    let args = with(pd_args(&[&p], &[&d]), |args| args.pair.policy = Some(PolicyName::Manual));
    let gateway = Gateway::start(args).await;
    gateway.until_ready().await;
    for (header, user) in [(Some("one"), "two"), (None, "one"), (Some("three"), "one"), (Some(""), "three")] {
        let mut request = gateway.client.post(gateway.url("/v1/chat/completions"));
        if let Some(session) = header {
            request = request.header("x-session-id", session);
        }
        let answer = request.body(json!({"messages": [], "user": user}).to_string()).send().await.unwrap();
        assert_eq!(answer.status(), 200);
        p.next().await;
    }
    assert_eq!(gateway.post("/v1/chat/completions", r#"{"messages":[]}"#).await.status(), 200);
    let text = gateway.metrics().await;
    for (branch, both_sides) in [("vacant", 4), ("occupied_hit", 4), ("occupied_miss", 0), ("no_routing_id", 2)] {
        let line = format!("smg_manual_policy_branch_total{{branch=\"{branch}\"}} {both_sides}\n");
        assert!(text.contains(&line), "{line} is not in\n{text}");
    }
    assert!(text.contains("smg_manual_policy_cache_entries 4\n"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_conversation_stays_with_the_worker_that_holds_it() {
    let (p, mut q) = (Worker::start("prefill", well).await, Worker::start("prefill", well).await);
    let d = Worker::start("decode", well).await;
    let args = with(pd_args(&[&p, &q], &[&d]), |args| args.pair.prefill_policy = Some(PolicyName::CacheAware));
    let gateway = Gateway::start(args).await;
    gateway.until("/readiness", |_, said| said["healthy_workers"] == 3).await;
    let mut at_q = Vec::new();
    for conversation in 0..16 {
        let said = |turn: usize| format!("{conversation} says {turn} ").repeat(40);
        let mut messages = vec![json!({"role": "user", "content": said(0)})];
        for turn in 1..4 {
            let body = json!({"messages": messages}).to_string();
            assert_eq!(gateway.post("/v1/chat/completions", body).await.status(), 200);
            gateway.until_idle().await;
            at_q.push(q.got.try_recv().is_ok());
            messages.push(json!({"role": "assistant", "content": "yes"}));
            messages.push(json!({"role": "user", "content": said(turn)}));
        }
    }
    assert!(at_q.chunks(3).all(|turns| turns.iter().all(|at| *at == turns[0])), "{at_q:?}");
    assert!(at_q.contains(&true) && at_q.contains(&false), "{at_q:?}");
    let text = gateway.metrics().await;
    assert!(text.contains("smg_cache_aware_policy_branch_total{branch=\"hit\"} 32\n"), "{text}");
    assert!(text.contains("smg_cache_aware_policy_branch_total{branch=\"miss\"} 16\n"), "{text}");
}
