//! The TCP backend as the suite sees it: both ends over loopback, with a relay between them that can hold, meter and cut.

use std::{net::TcpListener, sync::Arc};

use tandem_fabric::{
    Waker,
    memory::PoolMemory,
    tcp::{TcpSink, TcpSource},
};
use tandem_handoff::{ids::Channel, layout::PoolShape};
use tokio::{
    net::TcpStream,
    runtime::{Builder, Runtime},
    task::JoinHandle,
};

use crate::{
    Failure,
    backend::{Backend, Ends, Flow, Link, Proofs, SinkEnd, SourceEnd},
    no,
    relay::{Gate, relay},
};

/// Ends joined by one TCP stream per decode rank.
pub struct Tcp {
    /// Without the relay, for benchmarks: `flow` and `cut` have no effect then.
    direct: bool,
}

impl Tcp {
    pub fn relayed() -> Self {
        Self { direct: false }
    }

    pub fn direct() -> Self {
        Self { direct: true }
    }
}

impl Backend for Tcp {
    fn name(&self) -> &'static str {
        "tcp"
    }

    fn proofs(&self) -> Proofs {
        // What loopback's send and receive buffers of two connections grow to, and the relay's own buffer.
        Proofs { in_flight_bytes_max: 32 << 20, source_needs_peer: false }
    }

    fn pair(&self, prefill: PoolShape, decode: PoolShape, waker: Waker) -> Result<Ends, Failure> {
        let runtimes = [runtime()?, runtime()?];
        let (source, prefill_end) = source_end(&runtimes[0], prefill, &waker)?;
        let (sink, decode_end) = sink_end(&runtimes[1], decode, &waker)?;
        let link = TcpLink {
            direct: self.direct,
            prefill,
            decode,
            source,
            sink,
            gate: Arc::default(),
            relays: Vec::new(),
            waker,
            runtimes,
        };
        Ok(Ends { prefill: prefill_end, decode: decode_end, link: Box::new(link) })
    }
}

struct TcpLink {
    direct: bool,
    prefill: PoolShape,
    decode: PoolShape,
    /// The newest ends.
    source: TcpSource,
    sink: TcpSink,
    gate: Arc<Gate>,
    relays: Vec<JoinHandle<()>>,
    waker: Waker,
    /// P's and D's, since the two are different processes.
    runtimes: [Runtime; 2],
}

impl Link for TcpLink {
    fn open(&mut self, channel: Channel) -> Result<(), Failure> {
        for rank in 0..self.decode.tp {
            let [p, d] = &self.runtimes;
            if self.direct {
                let (at_p, at_d) = connected(p, d).map_err(no("loopback connection"))?;
                self.source.attach(channel, rank, at_p);
                self.sink.attach(channel, rank, at_d);
                continue;
            }
            let (at_p, near) = connected(p, p).map_err(no("loopback connection"))?;
            let (far, at_d) = connected(p, d).map_err(no("loopback connection"))?;
            self.source.attach(channel, rank, at_p);
            self.sink.attach(channel, rank, at_d);
            self.relays.push(p.spawn(relay(Arc::clone(&self.gate), Arc::default(), near, far)));
        }
        Ok(())
    }

    fn cut(&mut self) {
        for relay in self.relays.drain(..) {
            relay.abort();
        }
    }

    fn flow(&mut self, flow: Flow) {
        self.gate.set(flow);
    }

    fn restart_prefill(&mut self) -> Result<SourceEnd, Failure> {
        let (source, end) = source_end(&self.runtimes[0], self.prefill, &self.waker)?;
        self.source = source;
        Ok(end)
    }

    fn restart_decode(&mut self) -> Result<SinkEnd, Failure> {
        let (sink, end) = sink_end(&self.runtimes[1], self.decode, &self.waker)?;
        self.sink = sink;
        Ok(end)
    }
}

fn source_end(runtime: &Runtime, shape: PoolShape, waker: &Waker) -> Result<(TcpSource, SourceEnd), Failure> {
    let pools = pools(&shape)?;
    let source = TcpSource::new(pools.clone(), runtime.handle().clone(), Arc::clone(waker));
    Ok((source.clone(), SourceEnd { fabric: Box::new(source), pools }))
}

fn sink_end(runtime: &Runtime, shape: PoolShape, waker: &Waker) -> Result<(TcpSink, SinkEnd), Failure> {
    let pools = pools(&shape)?;
    let sink = TcpSink::new(shape, pools.clone(), runtime.handle().clone(), Arc::clone(waker));
    Ok((sink.clone(), SinkEnd { fabric: Box::new(sink), pools }))
}

fn pools(shape: &PoolShape) -> Result<Vec<Arc<PoolMemory>>, Failure> {
    (0..shape.tp).map(|_| PoolMemory::new(shape.pool_bytes()).map(Arc::new).map_err(no("memory"))).collect()
}

fn runtime() -> Result<Runtime, Failure> {
    Builder::new_multi_thread().worker_threads(1).enable_all().build().map_err(no("runtime"))
}

/// Two ends of a connection, each served by its own runtime.
fn connected(near: &Runtime, far: &Runtime) -> std::io::Result<(TcpStream, TcpStream)> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let dialled = std::net::TcpStream::connect(listener.local_addr()?)?;
    let accepted = listener.accept()?.0;
    let serve = |runtime: &Runtime, stream: std::net::TcpStream| {
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        let _in_runtime = runtime.enter();
        TcpStream::from_std(stream)
    };
    Ok((serve(near, dialled)?, serve(far, accepted)?))
}
