//! How long D's first byte takes to the client while P still works: one request at a time, D answers at once, P in 30 ms.
//! Also how long the client waits for it in all, which tells apart gateways that start D only after P.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::answer::Wanted;
use crate::histogram::Histogram;
use crate::plain::{Call, ask};
use crate::script::Script;
use crate::{Failure, Target};

const PREFILL: Duration = Duration::from_millis(30);
const WARMUP: u64 = 2;

pub fn run(target: &Target, requests: u64) -> Result<Value, Failure> {
    ask(target.mock, "/bench/reset")?;
    let (mut passed, mut waited) = (Histogram::default(), Histogram::default());
    for id in 1..=requests + WARMUP {
        let script = Script { id, stream: true, each: true, prefill: PREFILL, ..Script::default() };
        let began = Instant::now();
        let mut call = Call::chat(target.port, &script, None)?;
        let arrived_ns = call.first_byte()?;
        let wait = began.elapsed();
        let took_ns = arrived_ns.saturating_sub(call.incoming.stamp_ns()?);
        call.whole()?;
        call.incoming.check(Wanted { id, events: Some(script.events as usize) })?;
        if id > WARMUP {
            passed.record(Duration::from_nanos(took_ns));
            waited.record(wait);
        }
    }
    target.legs_add_up(requests + WARMUP)?;
    Ok(json!({
        "first_p50_us": passed.quantile_us(0.5),
        "first_p90_us": passed.quantile_us(0.9),
        "first_max_us": passed.max_us(),
        "waited_p50_us": waited.quantile_us(0.5),
    }))
}
