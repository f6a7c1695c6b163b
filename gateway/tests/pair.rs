//! Policies behind a whole gateway: what they need of a request reaches them.

mod support;

use std::collections::HashSet;

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
