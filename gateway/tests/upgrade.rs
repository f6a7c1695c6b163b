//! One gateway takes over from another: nobody is refused and no stream is cut, and a new one that fails at any step
//! leaves the old one serving.

mod support;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};

use serde_json::{Value, json};
use support::*;
use tandem_gateway::{GatewayArgs, StartError, Stop};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::sync::watch;

const STREAMS: usize = 20;
const LOOPS: usize = 4;

fn args(worker: &str, sock: &Path) -> GatewayArgs {
    with(GatewayArgs::default(), |a| {
        a.fleet.worker_urls = vec![worker.to_owned()];
        a.upgrade.upgrade_sock = Some(sock.to_owned());
        // Idle connections of the old process end by this.
        a.deadlines.client_read_timeout_secs = Some(2);
    })
}

fn taking_over(args: GatewayArgs) -> GatewayArgs {
    with(args, |a| a.upgrade.upgrade = true)
}

/// A worker whose streams go on until the sender says otherwise.
async fn worker() -> (Worker, watch::Sender<bool>) {
    let (end, ending) = watch::channel(false);
    let play = move |got: Got, socket: TcpStream| {
        let mut ending = ending.clone();
        async move {
            if got.json()["stream"] != true {
                return well(got, socket).await;
            }
            let socket = say(socket, format!("{SSE_HEAD}{}", chunk(&token("Pa")))).await?;
            ending.wait_for(|end| *end).await.ok()?;
            say(socket, format!("{}0\r\n\r\n", chunk(&finish()))).await
        }
    };
    (Worker::start("null", play).await, end)
}

/// How a gateway with these settings ends where it cannot take over.
async fn refused(args: GatewayArgs) -> String {
    let args = with(args, |a| {
        a.listen.host.get_or_insert("127.0.0.1".into());
        a.listen.port.get_or_insert(0);
        a.listen.prometheus_host = Some("127.0.0.1".into());
        a.listen.prometheus_port = Some(0);
    });
    let config = args.checked().unwrap();
    let (_stop, stopped) = watch::channel(None);
    let served = tokio::task::spawn_blocking(move || tandem_gateway::serve(config, Stop::Channel(stopped), |_| {}));
    match within("the end of the new gateway", served).await.unwrap() {
        Err(error @ StartError::Upgrade(_)) => error.to_string(),
        other => panic!("the takeover was to fail: {other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_end_where_they_began_and_nobody_is_refused() {
    let (w, end) = worker().await;
    let folder = tempfile::tempdir().unwrap();
    let sock = folder.path().join("upgrade.sock");
    let old = Gateway::start(args(&w.url(), &sock)).await;
    old.until_ready().await;
    let mut streams = Vec::new();
    for _ in 0..STREAMS {
        let mut stream = old.chat(true).await;
        within("a token", stream.chunk()).await.unwrap().unwrap();
        streams.push(stream);
    }
    let (going, answered) = (Arc::new(AtomicBool::new(true)), Arc::new(AtomicUsize::new(0)));
    let loops: Vec<_> = (0..LOOPS)
        .map(|_| {
            let (going, answered, url) = (going.clone(), answered.clone(), old.url("/v1/chat/completions"));
            tokio::spawn(async move {
                let client = reqwest::Client::builder().no_proxy().timeout(LIMIT).build().unwrap();
                while going.load(SeqCst) {
                    let answer = client.post(&url).json(&json!({"messages": []})).send().await.unwrap();
                    assert_eq!(answer.status(), 200);
                    assert!(answer.text().await.unwrap().contains("Paris"));
                    answered.fetch_add(1, SeqCst);
                }
            })
        })
        .collect();
    let new = Gateway::start(taking_over(args(&w.url(), &sock))).await;
    assert_eq!(new.addresses.data, old.addresses.data);
    let before = answered.load(SeqCst);
    new.until("/readiness", |status, _| status == 200 && answered.load(SeqCst) > before + 50).await;
    end.send_replace(true);
    for stream in streams {
        let text = within("the stream's end", stream.text()).await.unwrap();
        assert!(text.contains("[DONE]") && !text.contains("error"), "{text}");
    }
    old.ended().await;
    going.store(false, SeqCst);
    for client in loops {
        within("a client's last answer", client).await.unwrap();
    }
    assert_eq!(new.chat(false).await.status(), 200);
    assert!(sock.exists(), "the new process can be taken over from");
    drop(new);
}

/// Plays a new process up to a step, and dies.
async fn die_after(step: &str, sock: &Path) {
    let stream = within("the old process", UnixStream::connect(sock)).await.unwrap();
    let mut lines = BufReader::new(stream);
    let talk: [(&str, Value, &str); 3] = [
        ("hello", json!({"say": "hello", "protocol": 1, "pid": 1, "version": "0"}), "sockets"),
        ("ready", json!({"say": "ready"}), "relieved"),
        ("serving", json!({"say": "serving"}), ""),
    ];
    for (name, said, answer) in talk {
        lines.get_mut().write_all(format!("{said}\n").as_bytes()).await.unwrap();
        let mut line = String::new();
        if !answer.is_empty() {
            within("an answer", lines.read_line(&mut line)).await.unwrap();
            assert!(line.contains(answer), "{line}");
        }
        if name == step {
            return;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_process_that_dies_at_any_step_leaves_the_old_one_serving() {
    let (w, _end) = worker().await;
    let folder = tempfile::tempdir().unwrap();
    let sock = folder.path().join("upgrade.sock");
    let old = Gateway::start(args(&w.url(), &sock)).await;
    old.until_ready().await;
    for step in ["hello", "ready", "serving"] {
        die_after(step, &sock).await;
        old.until("/readiness", |status, _| status == 200).await;
        assert_eq!(old.chat(false).await.status(), 200, "after {step}");
        // On a connection of its own: it accepts again.
        let mut fresh = old.connect().await;
        fresh.write_all(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await.unwrap();
        within("an answer on a new connection", closed(&mut fresh)).await;
    }
    for count in ["{result=\"failed\"} 2", "{result=\"handed_over\"} 1"] {
        old.until_metrics(|text| text.contains(&format!("tandem_gateway_handovers_total{count}"))).await;
    }
    // And a sound one takes over afterwards.
    let new = Gateway::start(taking_over(args(&w.url(), &sock))).await;
    old.ended().await;
    assert_eq!(new.chat(false).await.status(), 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_process_without_workers_does_not_take_over() {
    let (w, _end) = worker().await;
    let folder = tempfile::tempdir().unwrap();
    let sock = folder.path().join("upgrade.sock");
    let old = Gateway::start(args(&w.url(), &sock)).await;
    old.until_ready().await;
    let nobody = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let dead = format!("http://{}", nobody.local_addr().unwrap());
    drop(nobody);
    let new = with(taking_over(args(&dead, &sock)), |a| a.upgrade.upgrade_timeout_secs = Some(1));
    let error = refused(new).await;
    assert!(error.contains("not ready"), "{error}");
    assert_eq!(old.chat(false).await.status(), 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_taken_over_is_said() {
    let (w, _end) = worker().await;
    let folder = tempfile::tempdir().unwrap();
    let sock = folder.path().join("upgrade.sock");
    let error = refused(taking_over(args(&w.url(), &sock))).await;
    assert!(error.contains("without --upgrade"), "{error}");
    drop(std::os::unix::net::UnixListener::bind(&sock).unwrap());
    let error = refused(taking_over(args(&w.url(), &sock))).await;
    assert!(error.contains("left over"), "{error}");
    // A left-over file is no obstacle for a first process.
    let old = Gateway::start(args(&w.url(), &sock)).await;
    let error = refused(args(&w.url(), &sock)).await;
    assert!(error.contains("serves already"), "{error}");
    let elsewhere = with(taking_over(args(&w.url(), &sock)), |a| a.listen.port = Some(old.addresses.data.port() ^ 1));
    let error = refused(elsewhere).await;
    assert!(error.contains("does not change addresses"), "{error}");
    drop(old);
}
