//! Which state each attempt of the handoff enters, for operators and tests: one log line per state, at level debug under
//! a target of its own. While that target is off, nothing is kept and nothing is looked at.

use std::{collections::BTreeMap, fmt};

use tandem_handoff::{
    ids::{Attempt, RequestId, Room},
    state::{AttemptState, KvPoll},
};

/// `--log-level info,tandem::handoff=debug` shows the announcements.
const TARGET: &str = "tandem::handoff";

/// A state that a request entered, or its end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Entered {
    State(AttemptState),
    Success,
    Failed,
}

impl Entered {
    fn poll(self) -> KvPoll {
        match self {
            Entered::State(state) => state.poll(),
            Entered::Success => KvPoll::Success,
            Entered::Failed => KvPoll::Failed,
        }
    }
}

impl fmt::Display for Entered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Entered::State(state) => state.fmt(f),
            Entered::Success => f.write_str("success"),
            Entered::Failed => f.write_str("failed"),
        }
    }
}

struct Followed {
    room: Room,
    last: Option<AttemptState>,
    attempt: Option<Attempt>,
    failed: bool,
}

/// The requests of one role that have not ended.
pub(crate) struct Announcer {
    role: &'static str,
    followed: BTreeMap<RequestId, Followed>,
}

impl Announcer {
    pub fn new(role: &'static str) -> Self {
        Self { role, followed: BTreeMap::new() }
    }

    /// A new request, if anybody wants to know.
    pub fn follow(&mut self, id: RequestId, room: Room) {
        if tracing::enabled!(target: TARGET, tracing::Level::DEBUG) {
            self.followed.insert(id, Followed { room, last: None, attempt: None, failed: false });
        }
    }

    /// Announces what has changed since the last look. `now` tells where a request is, and its attempt once there is one;
    /// `None` when its machine has forgotten it.
    pub fn look(&mut self, now: impl Fn(RequestId) -> Option<(AttemptState, Option<Attempt>)>) {
        let role = self.role;
        self.followed.retain(|&id, followed| {
            let state = now(id);
            if let Some((state, attempt)) = state {
                followed.attempt = attempt.or(followed.attempt);
                if followed.last.replace(state) != Some(state) {
                    say(role, followed, Entered::State(state));
                }
            } else if followed.failed {
                say(role, followed, Entered::Failed);
            }
            state.is_some() || !followed.failed
        });
    }

    /// The request failed. That is announced when its machine has forgotten it: until then its pages are not quiet.
    pub fn failed(&mut self, id: RequestId) {
        if let Some(followed) = self.followed.get_mut(&id) {
            followed.failed = true;
        }
    }

    pub fn succeeded(&mut self, id: RequestId) {
        if let Some(followed) = self.followed.remove(&id) {
            say(self.role, &followed, Entered::Success);
        }
    }
}

fn say(role: &str, followed: &Followed, entered: Entered) {
    let Followed { room, attempt, .. } = followed;
    // As the decode worker counts them, within its incarnation.
    let attempt = attempt.map(|attempt| format!("{:016x}.{}", attempt.decode.0, attempt.number));
    let attempt = attempt.as_deref().unwrap_or("none");
    tracing::debug!(target: TARGET, %room, attempt, state = %entered, kv_poll = ?entered.poll(), role, "a handoff entered a state");
}

#[cfg(test)]
mod tests {
    use tandem_handoff::ids::{Incarnation, SessionId};

    use super::*;
    use crate::log_lines::logged;

    const ID: RequestId = RequestId(4);

    fn attempt() -> Attempt {
        Attempt { prefill: Incarnation(1), decode: Incarnation(0xab), session: SessionId(3), number: 9 }
    }

    fn story() {
        let mut announcer = Announcer::new("decode");
        announcer.follow(ID, Room::new(77).unwrap());
        announcer.look(|_| Some((AttemptState::Dialling, None)));
        announcer.look(|_| Some((AttemptState::Offered, Some(attempt()))));
        announcer.look(|_| Some((AttemptState::Offered, Some(attempt()))));
        announcer.failed(ID);
        announcer.look(|_| Some((AttemptState::Draining, Some(attempt()))));
        announcer.look(|_| None);
        announcer.look(|_| panic!("it is followed no more"));
        announcer.follow(ID, Room::new(78).unwrap());
        announcer.look(|_| None);
        announcer.succeeded(ID);
        announcer.look(|_| panic!("it is followed no more"));
    }

    #[test]
    fn each_state_is_announced_once_and_the_end_last() {
        let lines = logged("info,tandem::handoff=debug", story);
        let states: Vec<&str> =
            lines.iter().filter_map(|line| line.split(" state=").nth(1)?.split(' ').next()).collect();
        assert_eq!(states, ["dialling", "offered", "draining", "failed", "success"], "{lines:?}");
        assert!(lines[0].contains("room=77 attempt=\"none\"") && lines[4].contains("room=78"), "{lines:?}");
        assert!(lines[3].contains("attempt=\"00000000000000ab.9\" state=failed kv_poll=Failed role=\"decode\""));
    }

    #[test]
    fn nothing_is_kept_while_nobody_wants_to_know() {
        let lines = logged("info", || {
            let mut announcer = Announcer::new("prefill");
            announcer.follow(ID, Room::new(77).unwrap());
            announcer.look(|_| panic!("nothing is looked at"));
        });
        assert!(lines.is_empty(), "{lines:?}");
    }
}
