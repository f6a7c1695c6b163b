//! How fast legs end that nobody needs any more, as the workers see it: the client leaves before the first token, or in
//! the stream; P fails; D fails. A worker that is never told counts with the limit.

use std::time::Duration;

use serde_json::{Map, Value, json};

use crate::histogram::Histogram;
use crate::plain::{Call, ask, until};
use crate::script::{Script, Side};
use crate::{Failure, Fleet, Target};

/// Longer than any worker of these scripts works.
const WORKS: Duration = Duration::from_secs(600);
/// Until here a leg's end is awaited.
const LIMIT: Duration = Duration::from_millis(500);
/// After so many legs in a row that were not ended the rest is not tried.
const GIVE_UP: u64 = 2;

#[derive(Clone, Copy)]
enum Story {
    LeavesEarly,
    LeavesStream,
    Fails(Side),
}

impl Story {
    fn name(self) -> &'static str {
        match self {
            Story::LeavesEarly => "client_leaves_before_first_token",
            Story::LeavesStream => "client_leaves_stream",
            Story::Fails(Side::Prefill) => "prefill_fails",
            Story::Fails(Side::Decode) => "decode_fails",
        }
    }

    fn script(self, id: u64) -> Script {
        let plain = Script { id, stream: true, watched: true, each: true, ..Script::default() };
        let soon = Duration::from_millis(5);
        match self {
            Story::LeavesEarly => Script { prefill: WORKS, decode: WORKS, ..plain },
            Story::LeavesStream => Script { gap: Duration::from_millis(5), events: 100_000, ..plain },
            Story::Fails(side) => Script { prefill: WORKS, decode: WORKS, fails: Some((side, soon)), ..plain },
        }
    }

    /// Legs that run when it happens, of a gateway that starts both at once or P first.
    fn legs(self, fleet: Fleet) -> &'static [&'static str] {
        match (self, fleet) {
            (Story::LeavesStream, _) => &["decode"],
            (Story::LeavesEarly, Fleet::Rooms) => &["prefill", "decode"],
            (Story::LeavesEarly, _) => &["prefill"],
            (Story::Fails(Side::Prefill), Fleet::Rooms) => &["decode"],
            (Story::Fails(Side::Decode), Fleet::Rooms) => &["prefill"],
            (Story::Fails(_), _) => &[],
        }
    }
}

pub fn run(target: &Target, requests: u64) -> Result<Value, Failure> {
    let mut result = Map::new();
    let stories = [Story::LeavesEarly, Story::LeavesStream, Story::Fails(Side::Prefill), Story::Fails(Side::Decode)];
    for story in stories {
        let legs = story.legs(target.fleet);
        if legs.is_empty() {
            continue;
        }
        let (mut took, mut missed) = (Histogram::default(), 0);
        for id in 1..=requests {
            let end = once(target, story, id, legs)?;
            missed += u64::from(end.is_none());
            took.record(end.unwrap_or(LIMIT));
            if missed == GIVE_UP {
                break;
            }
        }
        let summary = json!({
            "p50_us": took.quantile_us(0.5), "max_us": took.max_us(), "tried": took.count(), "never": missed,
            "limit_us": LIMIT.as_micros() as u64,
        });
        result.insert(story.name().into(), summary);
    }
    Ok(result.into())
}

/// From the happening to the end of the last leg; `None` beyond the limit.
fn once(target: &Target, story: Story, id: u64, legs: &[&str]) -> Result<Option<Duration>, Failure> {
    ask(target.mock, "/bench/reset")?;
    let mut call = Call::chat(target.port, &story.script(id), None)?;
    let times = |what| -> Result<Vec<(String, u64)>, Failure> {
        let notes = ask(target.mock, "/bench/notes")?;
        let notes = notes.as_array().into_iter().flatten().filter(|n| n[0] == id && n[2] == what);
        Ok(notes.filter_map(|n| Some((n[1].as_str()?.to_owned(), n[3].as_u64()?))).collect())
    };
    let all = |times: Vec<(String, u64)>| {
        let of = |leg: &&str| times.iter().find(|(side, _)| side == leg).map(|(_, ns)| *ns);
        legs.iter().map(of).collect::<Option<Vec<u64>>>().and_then(|all| all.into_iter().max())
    };
    let began = match story {
        Story::Fails(_) => {
            let failed = until(Duration::from_secs(5), || Ok(times("failed")?.first().map(|(_, ns)| *ns)))?;
            failed.ok_or_else(|| Failure::new("no worker failed as the script says"))?
        }
        Story::LeavesEarly | Story::LeavesStream => {
            if matches!(story, Story::LeavesStream) {
                call.first_byte()?;
            }
            until(Duration::from_secs(5), || Ok(all(times("arrived")?)))?
                .ok_or_else(|| Failure::new("a leg did not come to its worker"))?;
            std::thread::sleep(Duration::from_millis(3));
            let now = crate::mock::now_ns();
            drop(call);
            now
        }
    };
    let ended = until(LIMIT, || Ok(all(times("cut")?)))?;
    Ok(ended.map(|ns| Duration::from_nanos(ns.saturating_sub(began))))
}
