//! Both sides of the TCP backend over loopback: real streams, real pools.

use std::sync::Arc;

use tandem_handoff::{
    ids::{Attempt, Channel, SessionId},
    layout::{Mapping, PoolShape},
    source::Settlement,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    runtime::Runtime,
};

use super::{TcpSink, TcpSource, frame::Header};
use crate::{
    SinkFabric, SinkReport, SourceFabric, SourceReport,
    memory::PoolMemory,
    testkit::{CHANNEL, assert_moved, fill, peek, pieces, private, read, shape, until, write},
};

async fn connected() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let address = listener.local_addr().expect("address");
    let (dialled, accepted) = tokio::join!(TcpStream::connect(address), listener.accept());
    (dialled.expect("connect"), accepted.expect("accept").0)
}

#[test]
fn pages_arrive_byte_for_byte_for_every_pair_of_tp() {
    let runtime = Runtime::new().expect("runtime");
    for (p_tp, d_tp) in [(1, 1), (2, 1), (1, 2), (4, 2), (1, 8)] {
        let (p, d) = (shape(p_tp, 8), shape(d_tp, 8));
        let (p_pools, d_pools) = (private(&p), private(&d));
        fill(&p, &p_pools);
        let mut source = TcpSource::new(p_pools, runtime.handle().clone(), Arc::new(|| {}));
        let mut sink = TcpSink::new(d, d_pools.clone(), runtime.handle().clone(), Arc::new(|| {}));
        for rank in 0..d.tp {
            let (at_d, at_p) = runtime.block_on(connected());
            source.attach(CHANNEL, rank, at_p);
            sink.attach(CHANNEL, rank, at_d);
        }
        let attempt = CHANNEL.attempt(1);
        let (from, to) = ([5, 0, 2], [1, 7, 4]);
        let mapping = Mapping::new(&p, &d);
        let total = mapping.pieces(from.len());
        sink.expect(attempt, &to, mapping);
        source.post(attempt, pieces(&p, &d, &from, &to));
        let (mut landed, mut sent) = (0, 0);
        until(|| {
            for report in sink.poll() {
                match report {
                    SinkReport::Landed { pieces, .. } => landed += pieces.len(),
                    other => panic!("{other:?}"),
                }
            }
            for report in source.poll() {
                match report {
                    SourceReport::Settled { pieces, how: Settlement::Sent, .. } => sent += pieces as usize,
                    other => panic!("{other:?}"),
                }
            }
            landed == total && sent == total
        });
        assert_moved(&d, &d_pools, &from, &to);
    }
}

/// One sink, and the raw end of a stream on which the test plays P.
fn sink_and_raw(runtime: &Runtime, d: PoolShape) -> (TcpSink, TcpStream, Vec<Arc<PoolMemory>>) {
    let d_pools = private(&d);
    let sink = TcpSink::new(d, d_pools.clone(), runtime.handle().clone(), Arc::new(|| {}));
    let (at_d, raw) = runtime.block_on(connected());
    sink.attach(CHANNEL, 0, at_d);
    (sink, raw, d_pools)
}

fn header(attempt: Attempt, piece: u32, d: &PoolShape) -> [u8; super::frame::HEADER_BYTES] {
    Header { attempt, piece, bytes: d.page_bytes() as u64 }.encode()
}

#[test]
fn after_quiet_no_byte_of_a_frame_in_mid_copy_reaches_the_page() {
    let runtime = Runtime::new().expect("runtime");
    let d = shape(1, 64);
    let (mut sink, mut raw, d_pools) = sink_and_raw(&runtime, d);
    let attempt = CHANNEL.attempt(1);
    sink.expect(attempt, &[3], Mapping::new(&d, &d));
    let half = d.page_bytes() / 2;
    runtime.block_on(raw.write_all(&header(attempt, 0, &d))).expect("write");
    runtime.block_on(raw.write_all(&vec![1; half])).expect("write");
    let at = d.head_offset(3, 0);
    until(|| peek(&d_pools[0], at) == 1);
    sink.revoke(attempt);
    until(|| sink.poll().contains(&SinkReport::Quiet { attempt }));
    // The page has a new owner now; the rest of the dead frame and a whole further one are read and forgotten.
    write(&d_pools[0], at, &vec![9; d.page_bytes()]);
    runtime.block_on(raw.write_all(&vec![1; d.page_bytes() - half])).expect("write");
    runtime.block_on(raw.write_all(&header(attempt, 0, &d))).expect("write");
    runtime.block_on(raw.write_all(&vec![1; d.page_bytes()])).expect("write");
    let next = CHANNEL.attempt(2);
    sink.expect(next, &[5], Mapping::new(&d, &d));
    runtime.block_on(raw.write_all(&header(next, 0, &d))).expect("write");
    runtime.block_on(raw.write_all(&vec![2; d.page_bytes()])).expect("write");
    until(|| sink.poll().contains(&SinkReport::Landed { attempt: next, pieces: vec![0] }));
    assert!(read(&d_pools[0], at, d.page_bytes()).iter().all(|&byte| byte == 9));
    assert!(read(&d_pools[0], d.head_offset(5, 0), d.page_bytes()).iter().all(|&byte| byte == 2));
}

#[test]
fn bytes_that_are_no_frame_of_the_channel_break_it_and_touch_nothing() {
    let runtime = Runtime::new().expect("runtime");
    let d = shape(1, 8);
    let attempt = CHANNEL.attempt(1);
    let foreign = Channel { session: SessionId(4), ..CHANNEL }.attempt(1);
    let huge = Header { attempt, piece: 0, bytes: u64::MAX }.encode();
    let outside = header(attempt, 1, &d);
    for bytes in [[7; super::frame::HEADER_BYTES], header(foreign, 0, &d), huge, outside] {
        let (mut sink, mut raw, d_pools) = sink_and_raw(&runtime, d);
        sink.expect(attempt, &[3], Mapping::new(&d, &d));
        runtime.block_on(raw.write_all(&bytes)).expect("write");
        until(|| matches!(&sink.poll()[..], [SinkReport::Broken { .. }]));
        sink.revoke(attempt);
        until(|| sink.poll().contains(&SinkReport::Quiet { attempt }));
        assert!(read(&d_pools[0], 0, d.pool_bytes()).iter().all(|&byte| byte == 0));
    }
}

#[test]
fn a_stop_settles_every_piece_though_the_peer_reads_nothing() {
    let runtime = Runtime::new().expect("runtime");
    let p = PoolShape { pages: 64, ..shape(1, 256) };
    let (mut at_d, at_p) = runtime.block_on(connected());
    let mut source = TcpSource::new(private(&p), runtime.handle().clone(), Arc::new(|| {}));
    source.attach(CHANNEL, 0, at_p);
    let attempt = CHANNEL.attempt(1);
    let pages: Vec<u32> = (0..64).collect();
    source.post(attempt, pieces(&p, &p, &pages, &pages));
    runtime.block_on(async { at_d.read_exact(&mut [0; 1]).await }).expect("the first byte came");
    source.stop(attempt);
    let mut settled = 0;
    until(|| {
        for report in source.poll() {
            match report {
                SourceReport::Settled { pieces, .. } => settled += pieces,
                other => panic!("{other:?}"),
            }
        }
        settled == 64
    });
}

#[test]
fn a_close_settles_every_piece() {
    let runtime = Runtime::new().expect("runtime");
    let p = PoolShape { pages: 64, ..shape(1, 256) };
    let (at_d, at_p) = runtime.block_on(connected());
    let mut source = TcpSource::new(private(&p), runtime.handle().clone(), Arc::new(|| {}));
    source.attach(CHANNEL, 0, at_p);
    let pages: Vec<u32> = (0..64).collect();
    source.post(CHANNEL.attempt(1), pieces(&p, &p, &pages, &pages));
    source.close(CHANNEL);
    let mut settled = 0;
    until(|| {
        for report in source.poll() {
            if let SourceReport::Settled { pieces, .. } = report {
                settled += pieces;
            }
        }
        settled == 64
    });
    drop(at_d);
}
