//! What many streams cost a gateway in memory: first streams that rest after one event, then readers that do not read
//! while D sends all it can. Afterwards every answer is read to its end and checked.

use std::time::Duration;

use serde_json::{Value, json};

use crate::answer::Wanted;
use crate::plain::{Call, ask};
use crate::process::{Cost, Tree};
use crate::script::Script;
use crate::{Failure, Target};

/// Streams that are opened before the first event of each is awaited.
const BATCH: usize = 100;
/// About 2.6 MB per slow reader.
const SLOW_EVENTS: u32 = 12_000;
const SLOW_RECEIVE_BYTES: usize = 16 << 10;
const QUIET: Duration = Duration::from_millis(300);

pub fn run(target: &Target, idle: usize, slow: usize) -> Result<Value, Failure> {
    let gateway = target.gateway.ok_or_else(|| Failure::new("--gateway is needed to measure it"))?;
    ask(target.mock, "/bench/reset")?;
    let before = gateway.cost()?;
    let resting = rest(target, idle)?;
    let with_idle = settled(gateway)?;
    drop(resting);
    std::thread::sleep(2 * QUIET);
    let between = gateway.cost()?;
    ask(target.mock, "/bench/reset")?;
    gateway.forget_peak()?;
    let readers = open_slow(target, slow)?;
    let with_slow = settled(gateway)?;
    let pushed = ask(target.mock, "/bench/stats")?["sent_bytes"].as_u64().unwrap_or(0);
    read_all(readers)?;
    let after = gateway.cost()?;
    let per_stream = |cost: Cost, base: Cost, streams: usize| {
        (cost.resident_kib.saturating_sub(base.resident_kib)) as f64 / streams.max(1) as f64
    };
    Ok(json!({
        "before_kib": before.resident_kib,
        "idle_kib": with_idle.resident_kib,
        "idle_per_stream_kib": per_stream(with_idle, before, idle),
        "between_kib": between.resident_kib,
        "slow_kib": with_slow.resident_kib,
        "slow_peak_kib": after.peak_kib,
        "slow_per_reader_kib": per_stream(with_slow, between, slow),
        "slow_pushed_kib_per_reader": pushed / 1024 / slow.max(1) as u64,
        "after_kib": after.resident_kib,
    }))
}

fn rest(target: &Target, idle: usize) -> Result<Vec<Call>, Failure> {
    let mut calls: Vec<Call> = Vec::with_capacity(idle);
    while calls.len() < idle {
        let opened = calls.len();
        for i in opened..(opened + BATCH).min(idle) {
            let script = Script { id: i as u64 + 1, stream: true, silent_after: Some(1), ..Script::default() };
            calls.push(Call::chat(target.port, &script, None)?);
        }
        for call in &mut calls[opened..] {
            call.first_byte()?;
        }
    }
    Ok(calls)
}

fn open_slow(target: &Target, slow: usize) -> Result<Vec<(u64, Call)>, Failure> {
    let open = |id| {
        let script = Script { id, stream: true, events: SLOW_EVENTS, ..Script::default() };
        Ok((id, Call::chat(target.port, &script, Some(SLOW_RECEIVE_BYTES))?))
    };
    (1..=slow as u64).map(open).collect()
}

/// The memory once it does not move any more.
fn settled(gateway: Tree) -> Result<Cost, Failure> {
    let mut last = gateway.cost()?;
    for _ in 0..20 {
        std::thread::sleep(QUIET);
        let now = gateway.cost()?;
        if now.resident_kib.abs_diff(last.resident_kib) <= last.resident_kib / 200 {
            return Ok(now);
        }
        last = now;
    }
    Ok(last)
}

fn read_all(readers: Vec<(u64, Call)>) -> Result<(), Failure> {
    for (id, mut call) in readers {
        call.whole()?;
        call.incoming.check(Wanted { id, events: Some(SLOW_EVENTS as usize) })?;
    }
    Ok(())
}
