//! What two gateways say to each other while one takes over from the other: a line of JSON per message over a unix socket,
//! and the listening sockets themselves as descriptors beside one of them.
//!
//! ```text
//!   new                                   old
//!    │ ── Hello ─────────────────────────▶ │   same user? same protocol?
//!    │ ◀── Sockets + descriptors, Refused ─│   goes on accepting
//!    │     (probes its workers)            │
//!    │ ── Ready ─────────────────────────▶ │
//!    │ ◀── Relieved ────────────────────── │   has stopped accepting; connections wait in the kernel
//!    │ ── Serving ───────────────────────▶ │   lets its connections end
//!    │ ── Leaving ───────────────────────▶ │   only where the new one is itself stopped within the probation
//!    │ ◀── Refused ─────────────────────── │   at any time: it serves on itself
//! ```
//! An end without a word means that the other process has died.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncWriteExt, Interest};
use tokio::net::UnixStream;

/// Raised whenever two versions could misunderstand each other.
pub const PROTOCOL: u32 = 1;
/// Descriptors that one message may carry.
pub const DESCRIPTORS_MAX: usize = 32;
const LINE_BYTES_MAX: usize = 64 * 1024;

#[derive(Serialize, Deserialize, Clone, PartialEq, Debug)]
#[serde(tag = "say", rename_all = "snake_case")]
pub enum Message {
    Hello { protocol: u32, pid: u32, version: String },
    Sockets { pid: u32, version: String, sockets: Vec<SocketName> },
    Refused { why: String },
    Ready,
    Relieved,
    Serving,
    Leaving,
}

/// Names the descriptor at the same place in the list of descriptors.
#[derive(Serialize, Deserialize, Clone, PartialEq, Debug)]
pub struct SocketName {
    pub name: String,
    /// As the old one's settings have it: `host:port`, where the port may be 0.
    pub asked: String,
    /// The address in fact.
    pub address: String,
}

/// One side's end of the conversation.
pub struct Channel {
    stream: UnixStream,
    seen: Vec<u8>,
    /// What came beside the messages.
    pub descriptors: Vec<OwnedFd>,
}

impl Channel {
    pub fn new(stream: UnixStream) -> Self {
        Channel { stream, seen: Vec::new(), descriptors: Vec::new() }
    }

    /// The uid of the process at the other end, as the kernel knows it.
    pub fn peer_uid(&self) -> io::Result<u32> {
        self.stream.peer_cred().map(|peer| peer.uid())
    }

    pub async fn send(&mut self, message: &Message, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut line = serde_json::to_vec(message).map_err(io::Error::other)?;
        line.push(b'\n');
        let stream = &self.stream;
        let sent = stream.async_io(Interest::WRITABLE, || {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
            let mut beside = SendAncillaryBuffer::new(&mut space);
            if !descriptors.is_empty() && !beside.push(SendAncillaryMessage::ScmRights(descriptors)) {
                return Err(io::Error::other(format!("more than {DESCRIPTORS_MAX} descriptors")));
            }
            Ok(sendmsg(stream, &[IoSlice::new(&line)], &mut beside, SendFlags::NOSIGNAL)?)
        });
        let sent = sent.await?;
        self.stream.write_all(&line[sent..]).await
    }

    /// The next message; `None` when the other end is closed. Cancel-safe: what has come stays.
    pub async fn next(&mut self) -> io::Result<Option<Message>> {
        loop {
            if let Some(end) = self.seen.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.seen.drain(..=end).collect();
                return serde_json::from_slice(&line).map(Some).map_err(io::Error::other);
            }
            if self.seen.len() > LINE_BYTES_MAX {
                return Err(io::Error::other(format!("a message of more than {LINE_BYTES_MAX} bytes")));
            }
            if self.read().await? == 0 {
                return Ok(None);
            }
        }
    }

    async fn read(&mut self) -> io::Result<usize> {
        let mut bytes = [0u8; 4096];
        let stream = &self.stream;
        let (read, descriptors) = stream
            .async_io(Interest::READABLE, || {
                let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
                let mut beside = RecvAncillaryBuffer::new(&mut space);
                let into = &mut [IoSliceMut::new(&mut bytes)];
                let read = recvmsg(stream.as_fd(), into, &mut beside, RecvFlags::CMSG_CLOEXEC)?.bytes;
                let mut descriptors = Vec::new();
                for message in beside.drain() {
                    if let RecvAncillaryMessage::ScmRights(came) = message {
                        descriptors.extend(came);
                    }
                }
                Ok((read, descriptors))
            })
            .await?;
        self.seen.extend_from_slice(&bytes[..read]);
        self.descriptors.extend(descriptors);
        Ok(read)
    }

    pub fn into_std(self) -> io::Result<std::os::unix::net::UnixStream> {
        self.stream.into_std()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[tokio::test]
    async fn a_socket_goes_over_beside_its_name() {
        let (a, b) = UnixStream::pair().unwrap();
        let (mut a, mut b) = (Channel::new(a), Channel::new(b));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let names = SocketName { name: "data".into(), asked: "127.0.0.1:0".into(), address: address.to_string() };
        let said = Message::Sockets { pid: 1, version: "1".into(), sockets: vec![names] };
        a.send(&said, &[listener.as_fd()]).await.unwrap();
        a.send(&Message::Relieved, &[]).await.unwrap();
        drop(listener);
        assert_eq!(b.next().await.unwrap(), Some(said));
        assert_eq!(b.next().await.unwrap(), Some(Message::Relieved));
        let got = TcpListener::from(b.descriptors.pop().unwrap());
        assert_eq!(got.local_addr().unwrap(), address);
        drop(a);
        assert_eq!(b.next().await.unwrap(), None);
    }

    #[tokio::test]
    async fn what_is_no_message_is_an_error() {
        for bytes in [b"{\"say\":\"hum\"}\n".to_vec(), vec![b'x'; LINE_BYTES_MAX + 4096]] {
            let (mut a, b) = UnixStream::pair().unwrap();
            let writing = tokio::spawn(async move { a.write_all(&bytes).await });
            let mut channel = Channel::new(b);
            assert!(channel.next().await.is_err());
            drop(channel);
            let _ = writing.await.unwrap();
        }
    }
}
