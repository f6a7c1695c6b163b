//! Both sides of the shared-memory backend in one process: real streams, real mappings. Other processes come in
//! `children`.

use std::{
    fs::File,
    io::IoSlice,
    mem::MaybeUninit,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
    time::{Duration, Instant},
};

use rustix::{
    cmsg_space,
    fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create},
    net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg},
};
use tandem_handoff::{
    ids::{Channel, SessionId},
    layout::{Mapping, PoolShape},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
    runtime::Runtime,
};

use super::{
    PeerPools, ShmError, ShmSink, ShmSource,
    copier::BLOCK_BYTES,
    ledger::ANNOUNCED_MAX,
    messages::{ANSWER_BYTES, POST_BYTES, Post},
    receive_pools, send_pools,
};
use crate::{
    SinkFabric, SinkReport, SourceFabric,
    memory::{PoolMemory, SEALS},
    testkit::{CHANNEL, Settled, assert_moved, fill, peek, pieces, private, read, shape, until, write},
};

mod children;

fn shared(shape: &PoolShape) -> Vec<Arc<PoolMemory>> {
    (0..shape.tp).map(|_| Arc::new(PoolMemory::shared(shape.pool_bytes()).expect("memory"))).collect()
}

/// A stream on which P has handed its pools over, and what D mapped.
fn handed_over(runtime: &Runtime, p: &PoolShape, pools: &[Arc<PoolMemory>]) -> (UnixStream, UnixStream, PeerPools) {
    runtime.block_on(async {
        let (at_p, at_d) = UnixStream::pair().expect("streams");
        send_pools(&at_p, pools).await.expect("the pools are shared");
        let mapped = receive_pools(&at_d, p).await.expect("they are what the shape says");
        (at_p, at_d, mapped)
    })
}

struct Ends {
    runtime: Runtime,
    source: ShmSource,
    sink: ShmSink,
    p_pools: Vec<Arc<PoolMemory>>,
    d_pools: Vec<Arc<PoolMemory>>,
}

/// Both ends, joined by [`CHANNEL`].
fn joined(p: &PoolShape, d: &PoolShape) -> Ends {
    let runtime = Runtime::new().expect("runtime");
    let (p_pools, d_pools) = (shared(p), private(d));
    let source = ShmSource::new(runtime.handle().clone(), Arc::new(|| {}));
    let sink = ShmSink::new(*d, d_pools.clone(), Arc::new(|| {}));
    let (at_p, at_d, mapped) = handed_over(&runtime, p, &p_pools);
    source.attach(CHANNEL, at_p).expect("P attaches");
    sink.attach(CHANNEL, at_d, mapped).expect("D attaches");
    Ends { runtime, source, sink, p_pools, d_pools }
}

/// Pages of 1 MiB per rank of one.
fn large(pages: u32) -> PoolShape {
    PoolShape { pages, ..shape(1, 1024) }
}

#[test]
fn pages_arrive_byte_for_byte_for_every_pair_of_tp() {
    for (p_tp, d_tp) in [(1, 1), (2, 1), (1, 2), (4, 2), (1, 8)] {
        let (p, d) = (shape(p_tp, 8), shape(d_tp, 8));
        let mut ends = joined(&p, &d);
        fill(&p, &ends.p_pools);
        let (attempt, from, to) = (CHANNEL.attempt(1), [5, 0, 2], [1, 7, 4]);
        let mapping = Mapping::new(&p, &d);
        let total = mapping.pieces(from.len());
        ends.sink.expect(attempt, &to, mapping);
        ends.source.post(attempt, pieces(&p, &d, &from, &to));
        let (mut landed, mut settled) = (0, Settled::default());
        until(|| {
            for report in ends.sink.poll() {
                match report {
                    SinkReport::Landed { pieces, .. } => landed += pieces.len(),
                    other => panic!("{other:?}"),
                }
            }
            landed == total && settled.poll(&mut ends.source).all() == total as u64
        });
        assert_eq!(settled, Settled { sent: total as u64, ..Settled::default() });
        assert_moved(&d, &ends.d_pools, &from, &to);
    }
}

#[test]
fn after_quiet_no_byte_of_a_piece_in_mid_copy_reaches_the_page() {
    let p = PoolShape { layers: 128, ..large(1) };
    assert!(p.page_bytes() > 64 * BLOCK_BYTES);
    let mut ends = joined(&p, &p);
    write(&ends.p_pools[0], 0, &vec![1; p.page_bytes()]);
    let attempt = CHANNEL.attempt(1);
    ends.sink.expect(attempt, &[0], Mapping::new(&p, &p));
    ends.source.post(attempt, pieces(&p, &p, &[0], &[0]));
    until(|| peek(&ends.d_pools[0], 0) == 1);
    ends.sink.revoke(attempt);
    until(|| ends.sink.poll().contains(&SinkReport::Quiet { attempt }));
    // The page has a new owner now. The copier passes the rest over, which P hears once it has ended the attempt, too.
    write(&ends.d_pools[0], 0, &vec![9; p.page_bytes()]);
    let mut settled = Settled::default();
    ends.source.stop(attempt);
    until(|| settled.poll(&mut ends.source).all() == 1);
    assert_eq!(settled.dropped, 1);
    assert!(read(&ends.d_pools[0], 0, p.page_bytes()).iter().all(|&byte| byte == 9));
}

#[test]
fn what_d_does_not_know_of_is_p_s_again_at_once() {
    let p = shape(1, 8);
    let runtime = Runtime::new().expect("runtime");
    let p_pools = shared(&p);
    let mut source = ShmSource::new(runtime.handle().clone(), Arc::new(|| {}));
    // A decode worker that reads nothing.
    let (at_p, at_d, _mapped) = handed_over(&runtime, &p, &p_pools);
    source.attach(CHANNEL, at_p).expect("P attaches");
    let attempt = CHANNEL.attempt(1);
    let posted = 4 * ANNOUNCED_MAX as u64;
    let all: Vec<u32> = vec![0; posted as usize];
    source.post(attempt, pieces(&p, &p, &all, &all));
    source.stop(attempt);
    let mut settled = Settled::default();
    let dropped = settled.poll(&mut source).dropped;
    assert!(dropped >= posted - ANNOUNCED_MAX as u64, "{settled:?}");
    source.close(CHANNEL);
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(settled.poll(&mut source).all(), dropped, "nothing proves that D reads no more");
    drop(at_d);
    until(|| settled.poll(&mut source).all() == posted);
    assert_eq!((settled.unknown, source.serves(CHANNEL)), (posted - dropped, false));
}

#[test]
fn settled_frees_what_is_announced_though_d_answers_nothing() {
    let p = shape(1, 8);
    let runtime = Runtime::new().expect("runtime");
    let mut source = ShmSource::new(runtime.handle().clone(), Arc::new(|| {}));
    let (at_p, mut at_d, _mapped) = handed_over(&runtime, &p, &shared(&p));
    source.attach(CHANNEL, at_p).expect("P attaches");
    let attempt = CHANNEL.attempt(1);
    source.post(attempt, pieces(&p, &p, &[1, 2], &[3, 4]));
    runtime.block_on(at_d.read_exact(&mut [0; 2 * POST_BYTES])).expect("both were announced");
    source.stop(attempt);
    source.peer_settled(CHANNEL.attempt(2));
    assert_eq!(source.poll(), []);
    source.peer_settled(attempt);
    assert_eq!(Settled::default().poll(&mut source).dropped, 2);
}

#[test]
fn a_close_at_either_end_settles_everything() {
    for by_p in [true, false] {
        let p = large(4);
        let mut ends = joined(&p, &p);
        let attempt = CHANNEL.attempt(1);
        let pages: Vec<u32> = (0..2000).map(|at| at % 4).collect();
        ends.sink.expect(attempt, &pages, Mapping::new(&p, &p));
        ends.source.post(attempt, pieces(&p, &p, &pages, &pages));
        let mut settled = Settled::default();
        until(|| settled.poll(&mut ends.source).sent > 0);
        if by_p {
            ends.source.close(CHANNEL);
            until(|| ends.sink.poll().iter().any(|report| matches!(report, SinkReport::Broken { .. })));
        } else {
            ends.sink.close(CHANNEL);
            until(|| settled.poll(&mut ends.source).broken);
            ends.source.close(CHANNEL);
        }
        until(|| settled.poll(&mut ends.source).all() == 2000);
        ends.sink.revoke(attempt);
        until(|| ends.sink.poll().contains(&SinkReport::Quiet { attempt }));
    }
}

#[test]
fn dropping_an_end_closes_its_channels() {
    let p = shape(1, 8);
    let Ends { runtime, source, mut sink, .. } = joined(&p, &p);
    drop(source);
    until(|| matches!(&sink.poll()[..], [SinkReport::Broken { .. }]));
    drop(runtime);
    let Ends { mut source, sink, runtime, .. } = joined(&p, &p);
    drop(sink);
    let mut settled = Settled::default();
    until(|| settled.poll(&mut source).broken);
    drop(runtime);
}

#[test]
fn what_is_no_post_of_its_channel_breaks_that_channel_alone_and_touches_nothing() {
    let p = shape(1, 8);
    let good = Post { attempt: CHANNEL.attempt(1), piece: 0, rank: 0, offset: 0, bytes: p.page_bytes() as u64 };
    let foreign = Channel { session: SessionId(4), ..CHANNEL };
    // Not a post at all, and a good one that belongs to the other channel.
    for bytes in [[7; POST_BYTES], good.encode()] {
        let mut ends = joined(&p, &p);
        write(&ends.p_pools[0], 0, &vec![1; p.page_bytes()]);
        let (mut raw, at_d, mapped) = handed_over(&ends.runtime, &p, &ends.p_pools);
        ends.sink.attach(foreign, at_d, mapped).expect("a second channel");
        let (attempt, other) = (CHANNEL.attempt(1), foreign.attempt(2));
        ends.sink.expect(attempt, &[3], Mapping::new(&p, &p));
        ends.sink.expect(other, &[5], Mapping::new(&p, &p));
        ends.runtime.block_on(raw.write_all(&bytes)).expect("write");
        until(|| matches!(&ends.sink.poll()[..], [SinkReport::Broken { channel, .. }] if *channel == foreign));
        ends.sink.revoke(other);
        until(|| ends.sink.poll().contains(&SinkReport::Quiet { attempt: other }));
        assert!(read(&ends.d_pools[0], 0, p.pool_bytes()).iter().all(|&byte| byte == 0));
        ends.source.post(attempt, pieces(&p, &p, &[0], &[3]));
        until(|| ends.sink.poll().contains(&SinkReport::Landed { attempt, pieces: vec![0] }));
    }
}

#[test]
fn posts_of_their_own_channel_are_bounded_by_p_s_pools_and_d_s_books() {
    let p = shape(1, 8);
    let good = Post { attempt: CHANNEL.attempt(1), piece: 0, rank: 0, offset: 0, bytes: p.page_bytes() as u64 };
    let bad = [
        Post { piece: 1, ..good },
        Post { rank: 1, ..good },
        Post { bytes: 8, ..good },
        Post { offset: p.pool_bytes() as u64 - 8, ..good },
        Post { offset: u64::MAX - 8, ..good },
    ];
    for post in bad {
        let runtime = Runtime::new().expect("runtime");
        let d_pools = private(&p);
        let mut sink = ShmSink::new(p, d_pools.clone(), Arc::new(|| {}));
        let p_pools = shared(&p);
        write(&p_pools[0], 0, &vec![1; p.pool_bytes()]);
        let (mut raw, at_d, mapped) = handed_over(&runtime, &p, &p_pools);
        sink.attach(CHANNEL, at_d, mapped).expect("D attaches");
        sink.expect(good.attempt, &[3], Mapping::new(&p, &p));
        runtime.block_on(raw.write_all(&post.encode())).expect("write");
        until(|| matches!(&sink.poll()[..], [SinkReport::Broken { .. }]));
        assert!(read(&d_pools[0], 0, p.pool_bytes()).iter().all(|&byte| byte == 0), "{post:?}");
    }
}

#[test]
fn bytes_that_are_no_answer_break_the_channel_and_free_nothing() {
    let p = shape(1, 8);
    let runtime = Runtime::new().expect("runtime");
    let mut source = ShmSource::new(runtime.handle().clone(), Arc::new(|| {}));
    let (at_p, mut at_d, _mapped) = handed_over(&runtime, &p, &shared(&p));
    source.attach(CHANNEL, at_p).expect("P attaches");
    let attempt = CHANNEL.attempt(1);
    source.post(attempt, pieces(&p, &p, &[1], &[3]));
    runtime.block_on(at_d.read_exact(&mut [0; POST_BYTES])).expect("it was announced");
    runtime.block_on(at_d.write_all(&[7; ANSWER_BYTES])).expect("write");
    let mut settled = Settled::default();
    until(|| settled.poll(&mut source).broken);
    source.close(CHANNEL);
    assert_eq!(settled.poll(&mut source).all(), 0);
    drop(at_d);
    until(|| settled.poll(&mut source).unknown == 1);
}

/// Sends one message of the handing-over of rank 0 with these descriptors, and says how D takes it.
fn refusal(runtime: &Runtime, p: &PoolShape, files: &[OwnedFd]) -> ShmError {
    runtime.block_on(async {
        let (at_p, at_d) = UnixStream::pair().expect("streams");
        at_p.writable().await.expect("room");
        let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(2))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(files.is_empty() || control.push(SendAncillaryMessage::ScmRights(&files)));
        let message = *b"TSF1\0\0\0\0";
        sendmsg(&at_p, &[IoSlice::new(&message)], &mut control, SendFlags::empty()).expect("sent");
        receive_pools(&at_d, p).await.expect_err("it is no pool")
    })
}

fn file(flags: MemfdFlags, bytes: usize, seals: SealFlags) -> OwnedFd {
    let file = memfd_create("test", flags | MemfdFlags::ALLOW_SEALING).expect("a memory file");
    ftruncate(&file, bytes as u64).expect("its size");
    fcntl_add_seals(&file, seals).expect("seals");
    file
}

#[test]
fn only_sealed_pools_of_the_right_size_are_mapped() {
    let runtime = Runtime::new().expect("runtime");
    let p = PoolShape { pages: 512, ..shape(1, 8) };
    let bytes = p.pool_bytes();
    assert!(bytes.is_multiple_of(2 << 20), "a whole number of huge pages");
    let plain = |bytes, seals| file(MemfdFlags::CLOEXEC, bytes, seals);
    for missing in [SealFlags::SHRINK, SealFlags::GROW, SealFlags::FUTURE_WRITE] {
        let error = refusal(&runtime, &p, &[plain(bytes, SEALS - missing)]);
        assert!(matches!(error, ShmError::Unsealed { .. }), "without {missing:?}: {error}");
    }
    for size in [bytes - 1, bytes + 1, 0] {
        let error = refusal(&runtime, &p, &[plain(size, SEALS)]);
        assert!(matches!(error, ShmError::Size { .. }), "{size} bytes: {error}");
    }
    let on_disk = tempfile_of(bytes);
    assert!(matches!(refusal(&runtime, &p, &[on_disk]), ShmError::Unsealed { .. }));
    let huge = file(MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB, bytes, SEALS);
    assert!(matches!(refusal(&runtime, &p, &[huge]), ShmError::Kind { .. }));
    assert!(matches!(refusal(&runtime, &p, &[]), ShmError::Handover(_)));
    let two = [plain(bytes, SEALS), plain(bytes, SEALS)];
    assert!(matches!(refusal(&runtime, &p, &two), ShmError::Handover(_)));
}

/// A file of the file system, which nobody can seal.
fn tempfile_of(bytes: usize) -> OwnedFd {
    let path = std::env::temp_dir().join(format!("tandem-shm-{}", std::process::id()));
    let file = File::create(&path).expect("a file");
    std::fs::remove_file(&path).expect("it goes");
    file.set_len(bytes as u64).expect("its size");
    file.into()
}

#[test]
fn private_pools_cannot_be_handed_over() {
    let runtime = Runtime::new().expect("runtime");
    runtime.block_on(async {
        let (at_p, _at_d) = UnixStream::pair().expect("streams");
        let error = send_pools(&at_p, &private(&shape(1, 8))).await.expect_err("they are private");
        assert!(matches!(error, ShmError::Private));
    });
}

#[test]
fn a_revoke_is_quiet_within_a_block_while_p_is_silent_in_mid_message() {
    let p = large(4);
    let runtime = Runtime::new().expect("runtime");
    let mut sink = ShmSink::new(p, private(&p), Arc::new(|| {}));
    let (mut raw, at_d, mapped) = handed_over(&runtime, &p, &shared(&p));
    sink.attach(CHANNEL, at_d, mapped).expect("D attaches");
    let attempt = CHANNEL.attempt(1);
    sink.expect(attempt, &[0], Mapping::new(&p, &p));
    let post = Post { attempt, piece: 0, rank: 0, offset: 0, bytes: p.page_bytes() as u64 }.encode();
    runtime.block_on(raw.write_all(&post[..POST_BYTES / 2])).expect("write");
    let began = Instant::now();
    sink.revoke(attempt);
    until(|| sink.poll().contains(&SinkReport::Quiet { attempt }));
    assert!(began.elapsed() < Duration::from_secs(1));
}
