//! `transfer [MIB]`: what our backends move per second beside what the machine can do, block size by block size. One
//! line of JSON per size: bytes per second, the best of several rounds that take turns, and the mean processor time of
//! two ways.
//!
//! - `raw`: the baseline of tcp. Two threads and a plain loopback socket: one write call per block out of a pool, one
//!   blocking read after the other into the block's place in another pool. The same copies as ours: user to kernel,
//!   kernel to user.
//! - `raw_discard`: the same with a reader that reads into one small buffer: less memory is touched than any transfer
//!   between pools touches.
//! - `memcpy`: the baseline of shm. One copy from a pool into another, block by block.
//! - `tcp`, `shm`: ours: all pieces of one attempt posted, until each has landed.

use std::{
    io::{self, Read, Write},
    net::{TcpListener, TcpStream},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use tandem_conformance::{
    Backend, Failure,
    backend::{Ends, Waker},
    pattern::Prompt,
    shm::Shm,
    tcp::Tcp,
};
use tandem_fabric::{SinkReport, memory::PoolMemory};
use tandem_handoff::{
    ids::{Channel, Incarnation, SessionId},
    layout::{Mapping, PoolShape},
    source::Piece,
};

const BLOCKS: [usize; 3] = [32 << 10, 256 << 10, 2 << 20];
const ROUNDS: usize = 6;
const CHANNEL: Channel = Channel { prefill: Incarnation(1), decode: Incarnation(2), session: SessionId(3) };

fn main() -> Result<(), Failure> {
    let mib = std::env::args().nth(1).map_or(256, |text| text.parse().expect("the size of a pool in MiB"));
    BLOCKS.iter().try_for_each(|&block| compare(mib << 20, block))
}

fn compare(bytes: usize, block: usize) -> Result<(), Failure> {
    let mut raw = Raw::new(bytes, block).map_err(|error| Failure::new(format!("no raw sockets: {error}")))?;
    let mut tcp = Ours::new(&Tcp::direct(), bytes, block)?;
    let mut shm = Ours::new(&Shm::direct(), bytes, block)?;
    let (mut best, mut cpu) = ([0.0f64; 5], [0.0f64; 5]);
    for _ in 0..ROUNDS {
        for way in 0..5 {
            let before = cpu_s();
            let took = match way {
                0 => raw.copy(true),
                1 => raw.copy(false),
                2 => raw.memcpy(),
                3 => tcp.copy()?,
                _ => shm.copy()?,
            };
            best[way] = best[way].max(bytes as f64 / took.as_secs_f64());
            cpu[way] += (cpu_s() - before) / (ROUNDS * bytes) as f64 * 1e9;
        }
    }
    tcp.compare()?;
    shm.compare()?;
    let [copied, discarded, memcpy, tcp, shm] = best;
    println!(
        "{{\"block\":{block},\"raw\":{copied:.0},\"raw_discard\":{discarded:.0},\"memcpy\":{memcpy:.0},\
         \"tcp\":{tcp:.0},\"shm\":{shm:.0},\"raw_cpu_s_per_gb\":{:.3},\"tcp_cpu_s_per_gb\":{:.3}}}",
        cpu[0], cpu[3]
    );
    Ok(())
}

/// Processor time that this process has used: on a busy machine it says more than the time that passed. Linux counts in
/// hundredths of a second.
fn cpu_s() -> f64 {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let after_name = text.rsplit(')').next().unwrap_or_default();
    let ticks = after_name.split_whitespace().skip(11).take(2).filter_map(|field| field.parse::<f64>().ok());
    ticks.sum::<f64>() / 100.0
}

/// Plain sockets and plain memory.
struct Raw {
    block: usize,
    from: PoolMemory,
    to: PoolMemory,
    near: TcpStream,
    far: TcpStream,
}

impl Raw {
    fn new(bytes: usize, block: usize) -> io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let near = TcpStream::connect(listener.local_addr()?)?;
        let far = listener.accept()?.0;
        near.set_nodelay(true)?;
        let (mut from, mut to) = (PoolMemory::new(bytes)?, PoolMemory::new(bytes)?);
        // Every page exists before the clock runs.
        from.bytes_mut().fill(1);
        to.bytes_mut().fill(2);
        Ok(Self { block, from, to, near, far })
    }

    fn copy(&mut self, into_pool: bool) -> Duration {
        let Self { block, from, to, near, far } = self;
        let (block, from, to) = (*block, from.bytes_mut(), to.bytes_mut());
        let begun = Instant::now();
        thread::scope(|scope| {
            scope.spawn(|| from.chunks(block).try_for_each(|block| near.write_all(block)).expect("loopback carries"));
            if into_pool {
                to.chunks_mut(block).try_for_each(|block| far.read_exact(block)).expect("loopback carries");
            } else {
                let mut buffer = vec![0; 256 << 10];
                let mut left = to.len();
                while left > 0 {
                    let most = left.min(buffer.len());
                    left -= far.read(&mut buffer[..most]).expect("loopback carries");
                }
            }
        });
        begun.elapsed()
    }

    fn memcpy(&mut self) -> Duration {
        let (from, to) = (self.from.bytes_mut(), self.to.bytes_mut());
        let begun = Instant::now();
        for (to, from) in to.chunks_mut(self.block).zip(from.chunks(self.block)) {
            to.copy_from_slice(from);
        }
        begun.elapsed()
    }
}

/// Both ends of one of our backends, and a prompt that fills the pools.
struct Ours {
    ends: Ends,
    shape: PoolShape,
    prompt: Prompt,
    pieces: Vec<Piece>,
    attempts: u64,
}

impl Ours {
    fn new(backend: &dyn Backend, bytes: usize, block: usize) -> Result<Self, Failure> {
        let shape = shape(bytes, block);
        let engine = thread::current();
        let waker: Waker = Arc::new(move || engine.unpark());
        let mut ends = backend.pair(shape, shape, waker)?;
        ends.link.open(CHANNEL)?;
        let prompt = Prompt::new(1, 1);
        for page in 0..shape.pages {
            prompt.compute(&ends.prefill.pools, &shape, page as usize, page);
        }
        let other = Prompt::new(2, 1);
        for page in 0..shape.pages {
            other.compute(&ends.decode.pools, &shape, page as usize, page);
        }
        let mapping = Mapping::new(&shape, &shape);
        let piece = |page: u32| Piece {
            index: mapping.piece(page as usize, 0) as u32,
            source_rank: 0,
            source_offset: shape.head_offset(page, 0),
            target_rank: 0,
            target_offset: shape.head_offset(page, 0),
            bytes: block,
        };
        let pieces = (0..shape.pages).map(piece).collect();
        Ok(Self { ends, shape, prompt, pieces, attempts: 0 })
    }

    fn copy(&mut self) -> Result<Duration, Failure> {
        let pieces = self.pieces.clone();
        let pages: Vec<u32> = (0..self.shape.pages).collect();
        self.attempts += 1;
        let attempt = CHANNEL.attempt(self.attempts);
        let (source, sink) = (&mut self.ends.prefill.fabric, &mut self.ends.decode.fabric);
        let begun = Instant::now();
        sink.expect(attempt, &pages, Mapping::new(&self.shape, &self.shape));
        source.post(attempt, pieces);
        let mut landed = 0;
        while landed < pages.len() {
            for report in sink.poll() {
                match report {
                    SinkReport::Landed { pieces, .. } => landed += pieces.len(),
                    other => return Err(Failure::new(format!("the transfer broke: {other:?}"))),
                }
            }
            if landed < pages.len() {
                thread::park_timeout(Duration::from_millis(20));
            }
        }
        let took = begun.elapsed();
        sink.release(attempt);
        source.poll();
        Ok(took)
    }

    /// The last round moved the right bytes.
    fn compare(&self) -> Result<(), Failure> {
        let differs = |page: u32| self.prompt.differs(&self.ends.decode.pools, &self.shape, page as usize, page);
        match (0..self.shape.pages).find_map(differs) {
            Some(wrong) => Err(Failure::new(format!("the transfer moved wrong bytes: {wrong}"))),
            None => Ok(()),
        }
    }
}

/// One head, pages of one block.
fn shape(bytes: usize, block: usize) -> PoolShape {
    let layer = 2 * 16 * 128 * 4;
    PoolShape {
        layers: (block / layer) as u32,
        kv_heads: 1,
        head_dim: 128,
        page_size: 16,
        element_bytes: 4,
        tp: 1,
        pages: (bytes / block) as u32,
    }
}
