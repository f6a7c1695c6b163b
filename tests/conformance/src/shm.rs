//! The shared-memory backend as the suite sees it: both ends in one process, their posts and answers over a relay.
//!
//! What flows through the relay are not the bytes but the posts that name them, so `Flow::Bytes` passes as many posts as
//! stand for so many bytes. There is no network to cut: a cut tells D that P's end is gone, and P hears of it when D has
//! closed its own end, as the backend's proof demands.

use std::sync::Arc;

use tandem_fabric::{
    Waker,
    memory::PoolMemory,
    shm::{ShmSink, ShmSource, receive_pools, send_pools},
};
use tandem_handoff::{ids::Channel, layout::PoolShape};
use tokio::{
    net::UnixStream,
    runtime::{Builder, Runtime},
    sync::Notify,
};

use crate::{
    Failure,
    backend::{Backend, Ends, Flow, Link, Proofs, SinkEnd, SourceEnd},
    no,
    relay::{Gate, relay},
};

/// Bytes of one post on the stream.
const POST_BYTES: u64 = 64;

/// Ends joined by one Unix stream per channel.
pub struct Shm {
    /// Without the relay, for benchmarks: `flow` and `cut` have no effect then.
    direct: bool,
}

impl Shm {
    pub fn relayed() -> Self {
        Self { direct: false }
    }

    pub fn direct() -> Self {
        Self { direct: true }
    }
}

impl Backend for Shm {
    fn name(&self) -> &'static str {
        "shm"
    }

    fn proofs(&self) -> Proofs {
        // No piece settles before D has copied it; the bound is for the books of what is posted.
        Proofs { in_flight_bytes_max: 8 << 20, source_needs_peer: true }
    }

    fn pair(&self, prefill: PoolShape, decode: PoolShape, waker: Waker) -> Result<Ends, Failure> {
        let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build().map_err(no("runtime"))?;
        let (source, prefill_end) = source_end(&runtime, &prefill, &waker)?;
        let (sink, decode_end) = sink_end(decode, &waker)?;
        let link = ShmLink {
            direct: self.direct,
            prefill,
            decode,
            memories: prefill_end.pools.clone(),
            source,
            sink,
            gate: Arc::default(),
            cut: Arc::default(),
            waker,
            runtime,
        };
        Ok(Ends { prefill: prefill_end, decode: decode_end, link: Box::new(link) })
    }
}

struct ShmLink {
    direct: bool,
    prefill: PoolShape,
    decode: PoolShape,
    /// The pools of the newest prefill worker, and the newest ends.
    memories: Vec<Arc<PoolMemory>>,
    source: ShmSource,
    sink: ShmSink,
    gate: Arc<Gate>,
    cut: Arc<Notify>,
    waker: Waker,
    runtime: Runtime,
}

impl Link for ShmLink {
    fn open(&mut self, channel: Channel) -> Result<(), Failure> {
        let _in_runtime = self.runtime.enter();
        let (at_p, near) = UnixStream::pair().map_err(no("Unix sockets"))?;
        let exchange = async { tokio::join!(send_pools(&at_p, &self.memories), receive_pools(&near, &self.prefill)) };
        let (sent, pools) = self.runtime.block_on(exchange);
        let refused = |error| Failure::new(format!("the pools were not handed over: {error}"));
        sent.map_err(refused)?;
        let pools = pools.map_err(refused)?;
        self.source.attach(channel, at_p).map_err(no("task"))?;
        if self.direct {
            return self.sink.attach(channel, near, pools).map_err(no("copier"));
        }
        let (far, at_d) = UnixStream::pair().map_err(no("Unix sockets"))?;
        self.sink.attach(channel, at_d, pools).map_err(no("copier"))?;
        self.runtime.spawn(relay(Arc::clone(&self.gate), Arc::clone(&self.cut), near, far));
        Ok(())
    }

    fn cut(&mut self) {
        self.cut.notify_waiters();
    }

    fn flow(&mut self, flow: Flow) {
        let page_bytes = self.prefill.page_bytes() as u64;
        self.gate.set(match flow {
            Flow::Bytes(bytes) => Flow::Bytes(bytes * POST_BYTES / page_bytes),
            other => other,
        });
    }

    fn restart_prefill(&mut self) -> Result<SourceEnd, Failure> {
        let (source, end) = source_end(&self.runtime, &self.prefill, &self.waker)?;
        self.source = source;
        self.memories = end.pools.clone();
        Ok(end)
    }

    fn restart_decode(&mut self) -> Result<SinkEnd, Failure> {
        let (sink, end) = sink_end(self.decode, &self.waker)?;
        self.sink = sink;
        Ok(end)
    }
}

fn source_end(runtime: &Runtime, shape: &PoolShape, waker: &Waker) -> Result<(ShmSource, SourceEnd), Failure> {
    let pool = |_| PoolMemory::shared(shape.pool_bytes()).map(Arc::new).map_err(no("shared memory"));
    let pools = (0..shape.tp).map(pool).collect::<Result<Vec<_>, _>>()?;
    let source = ShmSource::new(runtime.handle().clone(), Arc::clone(waker));
    Ok((source.clone(), SourceEnd { fabric: Box::new(source), pools }))
}

fn sink_end(shape: PoolShape, waker: &Waker) -> Result<(ShmSink, SinkEnd), Failure> {
    let pool = |_| PoolMemory::new(shape.pool_bytes()).map(Arc::new).map_err(no("memory"));
    let pools = (0..shape.tp).map(pool).collect::<Result<Vec<_>, _>>()?;
    let sink = ShmSink::new(shape, pools.clone(), Arc::clone(waker));
    Ok((sink.clone(), SinkEnd { fabric: Box::new(sink), pools }))
}
