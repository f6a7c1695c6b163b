//! A decode worker played by the test, which errs in ways that real ones have had; the real ones are served all the same.

use tandem_handoff::{
    ids::{Channel, Incarnation, SessionId},
    wire::{Frame, Reserve, hello::Identity, prompt_hash, transfer::Transfer},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream as AsyncStream,
};

use super::*;
use crate::bootstrap::{
    channel::write_framed,
    handshake::{Met, Nonces, bind_stream, greet_prefill},
};

const ME: Incarnation = Incarnation(77);

pub(super) fn no_key() -> HandoffKey {
    HandoffKey::load(None).expect("no key is a key")
}

/// A connection that has left HTTP.
pub(super) async fn upgraded(port: u16, protocol: &str) -> AsyncStream {
    let mut stream = AsyncStream::connect(("127.0.0.1", port)).await.expect("connect");
    let head = format!("GET /handoff HTTP/1.1\r\nhost: p\r\nconnection: upgrade\r\nupgrade: {protocol}\r\n\r\n");
    stream.write_all(head.as_bytes()).await.expect("write");
    let mut answer = Vec::new();
    while !answer.ends_with(b"\r\n\r\n") {
        answer.push(stream.read_u8().await.expect("an answer"));
    }
    assert!(answer.starts_with(b"HTTP/1.1 101"), "{}", String::from_utf8_lossy(&answer));
    stream
}

/// A control channel that passed Hello.
async fn channel(port: u16) -> (AsyncStream, Channel, Nonces) {
    let mut stream = upgraded(port, "tandem-control").await;
    let identity = Identity::new([1; 16], shape(1), "test", Transfer::default());
    match greet_prefill(&mut stream, &no_key(), ME, &identity, |_| None).await {
        Ok(Met::New { channel, nonces, .. }) => (stream, channel, nonces),
        Ok(Met::Known(..)) => panic!("nothing is known"),
        Err(refusal) => panic!("{refusal:?}"),
    }
}

fn reserve(channel: Channel, number: u64) -> Frame {
    Frame::Reserve(Reserve {
        attempt: channel.attempt(number),
        room: Room::new(999).expect("in range"),
        prompt_tokens: PROMPT.len() as u32,
        prompt_hash: prompt_hash(&PROMPT),
        held_tokens: 0,
        held_hash: prompt_hash(&[]),
        checksums: false,
        pages: vec![0, 1, 2],
    })
}

#[test]
fn a_peer_that_never_reads_is_let_go_and_blocks_nobody() {
    let mut pair = Pair::same();
    let (mut stream, channel, _) = pair.runtime.block_on(channel(pair.port));
    // Every Reserve but the first is answered by two frames, which nobody reads.
    let flood = pair.runtime.spawn(async move {
        let mut number = 0;
        loop {
            number += 1;
            if write_framed(&mut stream, &reserve(channel, number).encode()).await.is_err() {
                return;
            }
        }
    });
    let (start, mut slowest) = (Instant::now(), Duration::ZERO);
    while !flood.is_finished() {
        assert!(start.elapsed() < LIMIT, "P still waits for a peer that reads nothing");
        let (now, before) = (pair.now(), Instant::now());
        pair.p().poll(now);
        slowest = slowest.max(before.elapsed());
        std::thread::yield_now();
    }
    assert!(slowest < Duration::from_secs(1), "a call of the engine's thread took {slowest:?}");
    pair.assert_serves(1, 7);
}

#[test]
fn a_wrong_name_of_a_process_is_refused_by_a_typed_error_and_harms_nobody() {
    let mut pair = Pair::same();
    let port = pair.port;
    pair.runtime.block_on(async {
        let (mut control, own, nonces) = channel(port).await;
        let other_prefill = Channel { prefill: Incarnation(1), ..own };
        let other_session = Channel { session: SessionId(own.session.0 + 1), ..own };
        let other_nonces = Nonces { decode: [0; 32], prefill: [0; 32] };
        for (name, rank, nonces) in
            [(other_prefill, 0, nonces), (other_session, 0, nonces), (own, 1, nonces), (own, 0, other_nonces)]
        {
            let mut data = upgraded(port, "tandem-data").await;
            let refused = bind_stream(&mut data, &no_key(), name, rank, &nonces).await;
            assert_eq!(refused, Err("the data stream belongs to no open channel".to_owned()), "{name:?} {rank}");
        }
        let mut data = upgraded(port, "tandem-data").await;
        assert_eq!(bind_stream(&mut data, &no_key(), own, 0, &nonces).await, Ok(()));
        // A heartbeat for a process that this one is not ends the channel.
        let ping = Frame::Ping { from: ME, to: Incarnation(1) };
        write_framed(&mut control, &ping.encode()).await.expect("write");
        let mut rest = Vec::new();
        tokio::time::timeout(LIMIT, control.read_to_end(&mut rest)).await.expect("P closes it").expect("in order");
    });
    pair.assert_serves(1, 7);
}
