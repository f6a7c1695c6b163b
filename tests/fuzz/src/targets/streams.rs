//! A data stream as a decode worker reads it: any bytes land whole pieces of a live attempt in its pages, are thrown
//! away, or break the stream. No byte reaches another page, and the attempt becomes quiet afterwards.

use std::{sync::Arc, time::Duration};

use tandem_fabric::{
    SinkFabric, SinkReport,
    memory::PoolMemory,
    tcp::{
        TcpSink,
        frame::{HEADER_BYTES, Header},
    },
};
use tandem_handoff::{
    ids::{Attempt, Channel},
    layout::{Mapping, PoolShape},
};
use tokio::{
    io::AsyncWriteExt,
    net::{TcpListener, TcpStream},
    runtime::{Builder, Runtime},
};

use super::frames::attempt;
use crate::Target;

/// Nothing here takes longer, unless it hangs.
const LIMIT: Duration = Duration::from_secs(4);
const PAGES: [u32; 2] = [2, 1];
const SHAPE: PoolShape =
    PoolShape { layers: 1, kv_heads: 2, head_dim: 2, page_size: 4, element_bytes: 2, tp: 1, pages: 4 };

type Decode = fn(&[u8; HEADER_BYTES]) -> Option<Header>;

/// Tries this reading of a header, and the real reader of a stream.
pub struct Streams {
    pub decode: Decode,
    runtime: Runtime,
}

impl Streams {
    pub fn real() -> Self {
        Self::with(Header::decode)
    }

    /// # Panics
    /// When the system gives no runtime.
    pub fn with(decode: Decode) -> Self {
        Self { decode, runtime: Builder::new_current_thread().enable_all().build().expect("a runtime") }
    }
}

fn piece(attempt: Attempt, piece: u32) -> Vec<u8> {
    let bytes = SHAPE.page_bytes();
    let header = Header { attempt, piece, bytes: bytes as u64 };
    [&header.encode()[..], &vec![0x5A; bytes]].concat()
}

impl Target for Streams {
    fn name(&self) -> &'static str {
        "streams"
    }

    fn seeds(&self) -> Vec<Vec<u8>> {
        let live = attempt(1);
        let dead = attempt(9);
        vec![
            [piece(live, 0), piece(live, 1)].concat(),
            [piece(dead, 0), piece(live, 1), piece(dead, 7)].concat(),
            piece(live, 0)[..HEADER_BYTES + 3].to_vec(),
        ]
    }

    fn input_bytes_max(&self) -> usize {
        1024
    }

    fn memory_bytes_max(&self, input_bytes: usize) -> usize {
        (1 << 20) + 16 * input_bytes
    }

    fn run(&self, input: &[u8]) -> String {
        let header = input.first_chunk().map(|bytes| {
            let header = (self.decode)(bytes);
            if let Some(header) = &header {
                assert!(header.encode() == *bytes, "{header:?} has another encoding than the bytes it came from");
            }
            header.is_some()
        });
        let (landed, why) = self
            .runtime
            .block_on(async { tokio::time::timeout(LIMIT, read(input)).await })
            .expect("a stream that ends is read to its end");
        format!("{header:?}, {} pieces landed, then {why}", "i".repeat(landed))
    }
}

/// How many pieces landed, and why the stream ended.
async fn read(input: &[u8]) -> (usize, String) {
    let pool = Arc::new(PoolMemory::new(SHAPE.pool_bytes()).expect("memory"));
    let mut sink = TcpSink::new(SHAPE, vec![Arc::clone(&pool)], tokio::runtime::Handle::current(), Arc::new(|| {}));
    let live = attempt(1);
    let channel: Channel = live.channel();
    let (at_d, mut at_p) = connected().await;
    sink.attach(channel, 0, at_d);
    sink.expect(live, &PAGES, Mapping::new(&SHAPE, &SHAPE));
    // A reader that has seen enough resets the stream.
    let _ = at_p.write_all(input).await;
    // A reset at the end leaves no port behind in TIME_WAIT.
    at_p.set_zero_linger().expect("an open socket");
    drop(at_p);
    let mut landed = Vec::new();
    let why = 'end: loop {
        for report in sink.poll() {
            match report {
                SinkReport::Landed { attempt, pieces } if attempt == live => landed.extend(pieces),
                SinkReport::Broken { why, .. } => break 'end why,
                other => panic!("{other:?} of a live attempt"),
            }
        }
        tokio::task::yield_now().await;
    };
    sink.revoke(live);
    assert_eq!(sink.poll(), [SinkReport::Quiet { attempt: live }], "nothing reads any more");
    drop(sink);
    let count = landed.len();
    landed.sort_unstable();
    landed.dedup();
    assert!(landed.len() == count && landed.iter().all(|&piece| piece < 2), "pieces {landed:?} of {PAGES:?}");
    let mut pool = Arc::into_inner(pool).expect("the reader is gone");
    for page in (0..SHAPE.pages).filter(|page| !PAGES.contains(page)) {
        let at = SHAPE.head_offset(page, 0);
        let untouched = pool.bytes_mut()[at..at + SHAPE.page_bytes()].iter().all(|&byte| byte == 0);
        assert!(untouched, "page {page} was written, which nobody offered");
    }
    (count, why)
}

async fn connected() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    let (dialled, accepted) = tokio::join!(TcpStream::connect(address), listener.accept());
    (accepted.expect("accepted").0, dialled.expect("connected"))
}
