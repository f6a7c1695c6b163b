//! From lists and events to the set of workers. *Pure.*
//!
//! ```text
//!            list                     ADDED, MODIFIED, DELETED, BOOKMARK
//!  (nothing) ----> set at a version ------------------------------------> set at a later version
//!                     ^                                  |
//!                     |   410 Gone, any other ERROR      |
//!                     +----------------------------------+
//! ```
//! A list replaces everything, so that an event that was lost cannot leave a pod behind.

use std::collections::BTreeMap;

use kube::core::WatchEvent;

use super::pod::Pod;
use super::selector::Rules;
use crate::config::WorkerSpec;

/// What the pods add up to.
pub struct Pods {
    rules: Rules,
    /// By `namespace/name`.
    pods: BTreeMap<String, Seen>,
    version: String,
}

struct Seen {
    uid: String,
    worker: Result<Option<WorkerSpec>, String>,
}

/// What an event asks of the driver.
#[derive(PartialEq, Eq, Debug)]
pub enum Step {
    /// The set may be another now.
    Changed,
    /// Nothing to do.
    Same,
    /// The events from here on cannot be trusted to add up: list anew. Says why.
    Relist(String),
}

impl Pods {
    pub fn new(rules: Rules) -> Self {
        Pods { rules, pods: BTreeMap::new(), version: String::new() }
    }

    /// From which version a watch goes on.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Takes a whole list, as of `version`.
    pub fn relist(&mut self, pods: Vec<Pod>, version: String) {
        self.pods.clear();
        for pod in pods {
            self.put(pod);
        }
        self.version = version;
    }

    pub fn apply(&mut self, event: WatchEvent<Pod>) -> Step {
        match event {
            WatchEvent::Added(pod) | WatchEvent::Modified(pod) => {
                self.advance(&pod.metadata.resource_version);
                self.put(pod)
            }
            WatchEvent::Deleted(pod) => {
                self.advance(&pod.metadata.resource_version);
                self.remove(&pod)
            }
            WatchEvent::Bookmark(bookmark) => {
                self.advance(&bookmark.metadata.resource_version);
                Step::Same
            }
            WatchEvent::Error(status) if status.code == 410 => {
                Step::Relist("the API no longer has the events since the last one (410 Gone)".into())
            }
            WatchEvent::Error(status) => {
                Step::Relist(format!("the watch failed with {}: {}", status.code, status.message))
            }
        }
    }

    /// All workers, one for each URL, in a fixed order.
    pub fn workers(&self) -> Vec<WorkerSpec> {
        let mut by_url = BTreeMap::new();
        for worker in self.pods.values().filter_map(|seen| seen.worker.as_ref().ok()?.as_ref()) {
            by_url.entry(&worker.url).or_insert(worker);
        }
        by_url.into_values().cloned().collect()
    }

    /// What keeps pods from being workers and somebody has to correct: the pod, and why.
    pub fn complaints(&self) -> Vec<String> {
        let unusable = self.pods.iter().filter_map(|(key, seen)| Some((key, seen.worker.as_ref().err()?)));
        unusable.map(|(key, why)| format!("pod {key} is not used: {why}")).collect()
    }

    fn advance(&mut self, version: &str) {
        if !version.is_empty() {
            version.clone_into(&mut self.version);
        }
    }

    fn put(&mut self, pod: Pod) -> Step {
        let key = pod.key();
        let worker = pod.worker(&self.rules);
        if worker == Ok(None) {
            return self.pods.remove(&key).map_or(Step::Same, |_| Step::Changed);
        }
        let seen = Seen { uid: pod.metadata.uid, worker };
        match self.pods.get_mut(&key) {
            Some(known) if known.worker == seen.worker => {
                known.uid = seen.uid;
                Step::Same
            }
            Some(known) => {
                *known = seen;
                Step::Changed
            }
            None => {
                self.pods.insert(key, seen);
                Step::Changed
            }
        }
    }

    /// A pod of the same name that came after the deleted one stays.
    fn remove(&mut self, pod: &Pod) -> Step {
        let key = pod.key();
        match self.pods.get(&key) {
            Some(known) if known.uid == pod.metadata.uid => {
                self.pods.remove(&key);
                Step::Changed
            }
            _ => Step::Same,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::config::Role;
    use crate::discovery::kubernetes::selector::Selector;

    fn rules() -> Rules {
        let selector = |term: &str| Selector::parse(&[term.to_owned()]).unwrap();
        Rules::new(vec![(Role::Prefill, selector("role=p")), (Role::Decode, selector("role=d"))], 30000).unwrap()
    }

    fn pod(name: &str, role: &str, ip: &str) -> Value {
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": name, "namespace": "n", "uid": format!("{name}-1"), "labels": {"role": role},
                         "resourceVersion": "7", "annotations": {"sglang.ai/bootstrap-port": "8998"}},
            "spec": {"containers": [{"name": "sidecar"}, {"name": "worker"}]},
            "status": {"phase": "Running", "podIP": ip,
                       "conditions": [{"type": "ContainersReady", "status": "True"}, {"type": "Ready", "status": "True"}]},
        })
    }

    /// `pod` with one value changed.
    fn with(mut pod: Value, pointer: &str, value: Value) -> Value {
        *pod.pointer_mut(pointer).unwrap() = value;
        pod
    }

    fn event(kind: &str, object: Value) -> WatchEvent<Pod> {
        serde_json::from_value(json!({"type": kind, "object": object})).unwrap()
    }

    fn listed(pods: &[Value]) -> Pods {
        let mut state = Pods::new(rules());
        state.relist(pods.iter().map(|p| serde_json::from_value(p.clone()).unwrap()).collect(), "5".into());
        state
    }

    fn urls(state: &Pods) -> Vec<String> {
        state.workers().iter().map(|w| format!("{} {}", w.role.worker_type(), w.url)).collect()
    }

    #[test]
    fn a_list_then_events() {
        let mut state = listed(&[pod("a", "p", "10.0.0.1"), pod("b", "d", "fd00::2")]);
        assert_eq!(urls(&state), ["prefill http://10.0.0.1:30000", "decode http://[fd00::2]:30000"]);
        assert_eq!(state.workers()[0].bootstrap_port, Some(8998));
        assert_eq!(state.workers()[1].bootstrap_port, None, "a decode worker has none, whatever its annotations say");
        assert_eq!(state.apply(event("ADDED", pod("c", "d", "10.0.0.3"))), Step::Changed);
        assert_eq!(state.version(), "7");
        let gone = state.apply(event("DELETED", pod("a", "p", "10.0.0.1")));
        assert_eq!((gone, urls(&state).len()), (Step::Changed, 2));
    }

    #[test]
    fn what_happens_to_a_pod_happens_to_its_worker() {
        let a = pod("a", "p", "10.0.0.1");
        for (pointer, value, expected) in [
            ("/status/podIP", json!("10.0.0.9"), Some("prefill http://10.0.0.9:30000")),
            ("/metadata/labels/role", json!("d"), Some("decode http://10.0.0.1:30000")),
            ("/metadata/labels/role", json!("other"), None),
            ("/status/conditions/1/status", json!("False"), None),
            ("/status/conditions/1/status", json!("Unknown"), None),
            ("/status/conditions", Value::Null, None),
            ("/status/phase", json!("Failed"), None),
            ("/status/podIP", Value::Null, None),
            ("/metadata/labels", Value::Null, None),
        ] {
            let mut state = listed(std::slice::from_ref(&a));
            assert_eq!(state.apply(event("MODIFIED", with(a.clone(), pointer, value.clone()))), Step::Changed);
            assert_eq!(urls(&state), expected.into_iter().collect::<Vec<_>>(), "{pointer} {value}");
            state.apply(event("MODIFIED", a.clone()));
            assert_eq!(urls(&state), ["prefill http://10.0.0.1:30000"], "back from {pointer}");
        }
        let mut leaving = a.clone();
        leaving["metadata"]["deletionTimestamp"] = json!("2026-12-01T00:00:00Z");
        let mut state = listed(&[a]);
        assert_eq!((state.apply(event("MODIFIED", leaving)), urls(&state).len()), (Step::Changed, 0));
    }

    #[test]
    fn events_without_news_ask_for_nothing() {
        let a = pod("a", "p", "10.0.0.1");
        let mut state = listed(std::slice::from_ref(&a));
        assert_eq!(state.apply(event("MODIFIED", with(a, "/metadata/resourceVersion", json!("8")))), Step::Same);
        let bookmark = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"resourceVersion": "12"}});
        assert_eq!((state.apply(event("BOOKMARK", bookmark)), state.version()), (Step::Same, "12"));
        assert_eq!(state.apply(event("DELETED", pod("stranger", "x", "10.0.0.5"))), Step::Same);
        assert_eq!(urls(&state).len(), 1);
    }

    #[test]
    fn a_late_deletion_spares_the_pod_that_took_the_name() {
        let old = pod("a", "p", "10.0.0.1");
        let mut state = listed(std::slice::from_ref(&old));
        let new = with(pod("a", "p", "10.0.0.2"), "/metadata/uid", json!("a-2"));
        state.apply(event("ADDED", new));
        assert_eq!(state.apply(event("DELETED", old)), Step::Same);
        assert_eq!(urls(&state), ["prefill http://10.0.0.2:30000"]);
    }

    #[test]
    fn lost_events_ask_for_a_list_which_replaces_all() {
        let mut state = listed(&[pod("a", "p", "10.0.0.1"), pod("b", "d", "10.0.0.2")]);
        let gone = json!({"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"});
        assert!(matches!(state.apply(event("ERROR", gone)), Step::Relist(why) if why.contains("410")));
        assert_eq!(urls(&state).len(), 2, "until the list, what was known stands");
        state.relist(vec![serde_json::from_value(pod("b", "d", "10.0.0.2")).unwrap()], "9".into());
        assert_eq!((urls(&state), state.version()), (vec!["decode http://10.0.0.2:30000".to_owned()], "9"));
    }

    #[test]
    fn a_wrong_annotation_names_its_pod_and_harms_no_other() {
        for wrong in ["abc", "0", "70000", "-1", ""] {
            let bad =
                with(pod("bad", "p", "10.0.0.1"), "/metadata/annotations/sglang.ai~1bootstrap-port", json!(wrong));
            let mut state = listed(&[bad, pod("b", "d", "10.0.0.2")]);
            assert_eq!(urls(&state), ["decode http://10.0.0.2:30000"]);
            let said = state.complaints().join("");
            assert!(
                said.contains("n/bad") && said.contains("sglang.ai/bootstrap-port") && said.contains(wrong),
                "{said}"
            );
            state.apply(event("MODIFIED", pod("bad", "p", "10.0.0.1")));
            assert_eq!((urls(&state).len(), state.complaints().len()), (2, 0));
        }
    }

    #[test]
    fn our_annotations() {
        let mut a = pod("a", "p", "10.0.0.1");
        a["metadata"]["annotations"] = json!({"tandem/bootstrap-port": "9000", "sglang.ai/bootstrap-port": "8998",
                                              "tandem/port": "31000", "tandem/model": "m"});
        let worker = listed(&[a]).workers().remove(0);
        assert_eq!(
            (&*worker.url, worker.bootstrap_port, worker.model.as_deref()),
            ("http://10.0.0.1:31000", Some(9000), Some("m"))
        );
    }
}
