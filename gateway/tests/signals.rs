//! Signals to the gateway's own process, which is why this is the only test of its file.

mod support;

use std::io::Write;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use rustix::process::{Signal, getpid, kill_process};
use support::*;
use tandem_gateway::GatewayArgs;
use tokio::net::TcpStream;

/// What is logged.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_interrupt_grants_the_grace_and_a_second_one_ends_it() {
    let log = Log::default();
    let writer = log.clone();
    tracing_subscriber::fmt().with_writer(move || writer.clone()).init();
    let w = Worker::start("null", endless).await;
    let args = with(GatewayArgs::default(), |a| a.deadlines.shutdown_grace_period_secs = Some(600));
    let gateway = Gateway::start_for_signals(with(args, |a| a.fleet.worker_urls = vec![w.url()])).await;
    gateway.until_ready().await;
    let mut stream = gateway.chat(true).await;
    within("a token", stream.chunk()).await.unwrap().unwrap();
    kill_process(getpid(), Signal::INT).unwrap();
    let deadline = Instant::now() + LIMIT;
    while TcpStream::connect(gateway.addresses.data).await.is_ok() {
        assert!(Instant::now() < deadline, "new connections are still taken");
    }
    kill_process(getpid(), Signal::INT).unwrap();
    let rest = within("the stream's end", stream.text()).await.unwrap();
    assert!(rest.contains("gateway_stopping"), "{rest}");
    gateway.ended().await;
    let log = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    assert!(log.contains("told again to stop") && !log.contains("ERROR"), "{log}");
}
