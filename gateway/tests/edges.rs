//! The edges of HTTP between clients and the gateway: heads, bodies, connections, ids.

mod support;

use std::time::{Duration, Instant};

use serde_json::json;
use support::*;
use tandem_gateway::GatewayArgs;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// A gateway in front of one plain worker.
async fn plain(worker: &Worker, change: impl FnOnce(&mut GatewayArgs)) -> Gateway {
    let args = with(GatewayArgs::default(), |a| a.fleet.worker_urls = vec![worker.url()]);
    let gateway = Gateway::start(with(args, change)).await;
    gateway.until_ready().await;
    gateway
}

const CHAT: &str = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n";

fn chat(body: &str) -> String {
    format!("{CHAT}content-length: {}\r\n\r\n{body}", body.len())
}

/// One answer with a length off a connection; what came behind it stays in `seen`.
async fn answer(client: &mut (impl AsyncRead + Unpin), seen: &mut Vec<u8>) -> (u16, String, Vec<u8>) {
    loop {
        if let Some(end) = seen.windows(4).position(|w| w == b"\r\n\r\n") {
            let head = String::from_utf8(seen[..end + 4].to_vec()).unwrap().to_ascii_lowercase();
            let length = head.lines().find_map(|l| l.strip_prefix("content-length: ")?.parse::<usize>().ok()).unwrap();
            if seen.len() >= end + 4 + length {
                let body = seen[end + 4..end + 4 + length].to_vec();
                seen.drain(..end + 4 + length);
                return (head[9..12].parse().unwrap(), head, body);
            }
        }
        let read = within("an answer", client.read_buf(seen)).await.expect("no reset");
        assert!(read > 0, "the gateway closed after {:?}", String::from_utf8_lossy(seen));
    }
}

/// Sends raw bytes and reads to the connection's end.
async fn to_the_end(gateway: &Gateway, bytes: &[u8]) -> String {
    let mut client = gateway.connect().await;
    client.write_all(bytes).await.unwrap();
    let mut seen = Vec::new();
    within("the end of the connection", client.read_to_end(&mut seen)).await.expect("no reset");
    String::from_utf8(seen).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn twenty_thousand_kept_connections_requests_see_no_reset() {
    const CLIENTS: usize = 8;
    const EACH: usize = 2500;
    let w = Worker::start("null", well).await;
    let gateway = plain(&w, |_| {}).await;
    let mut clients = tokio::task::JoinSet::new();
    for number in 0..CLIENTS {
        let mut client = gateway.connect().await;
        // Half of the clients wait for each answer, the others send up to four requests ahead.
        let ahead = if number % 2 == 0 { 1 } else { 4 };
        clients.spawn(async move {
            let (mut seen, mut sent) = (Vec::new(), 0);
            for got in 0..EACH {
                while sent < EACH && sent < got + ahead {
                    client.write_all(chat("{}").as_bytes()).await.expect("no reset");
                    sent += 1;
                }
                assert_eq!(answer(&mut client, &mut seen).await.0, 200);
            }
            assert!(seen.is_empty());
        });
    }
    let all = async {
        while let Some(client) = clients.join_next().await {
            client.unwrap()
        }
    };
    tokio::time::timeout(Duration::from_secs(120), all).await.expect("20,000 answers in two minutes");
    gateway.until_idle().await;
    assert!(gateway.metrics().await.contains("tandem_gateway_clients_gone_total 0"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_closes_its_sending_half_counts_as_gone() {
    let (play, mut told) = hang();
    let mut w = Worker::start("null", play).await;
    let gateway = plain(&w, |_| {}).await;
    let mut client = gateway.connect().await;
    client.write_all(chat("{}").as_bytes()).await.unwrap();
    w.next().await;
    client.shutdown().await.unwrap();
    within("the close of the leg", told.recv()).await.unwrap();
    gateway.until_idle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_hops_may_read_differently_is_refused() {
    let w = Worker::start("null", well).await;
    let gateway = plain(&w, |_| {}).await;
    let post = "POST /v1/chat/completions HTTP/1.1\r\n";
    let chunked = "2\r\n{}\r\n0\r\n\r\n";
    for (head, body, code) in [
        (format!("{post}content-length: 2"), "{}", "malformed_request"),
        (format!("{CHAT}host: y\r\ncontent-length: 2"), "{}", "malformed_request"),
        (format!("{CHAT}content-length: 2, 2"), "{}", "malformed_request"),
        (format!("{CHAT}content-length: 2\r\ncontent-length: 2"), "{}", "malformed_request"),
        (format!("{CHAT}content-length: 2\r\ncontent-length: 3"), "{}", "malformed_request"),
        (format!("{CHAT}content-length: +2"), "{}", "malformed_request"),
        (format!("{CHAT}content-length: 2\r\ntransfer-encoding: chunked"), chunked, "malformed_request"),
        (format!("{CHAT}transfer-encoding: identity, chunked"), chunked, "malformed_request"),
        (format!("{CHAT}transfer-encoding: gzip, chunked"), chunked, "malformed_request"),
        (format!("{CHAT}transfer-encoding: chunked\r\ntransfer-encoding: chunked"), chunked, "malformed_request"),
        (format!("{CHAT}transfer-encoding: chunked, identity"), chunked, "malformed_request"),
        (format!("{CHAT}transfer-encoding : chunked"), chunked, "malformed_request"),
        (format!("{CHAT}x: a\r\n b\r\ncontent-length: 2"), "{}", "malformed_request"),
        (format!("{CHAT}x: y\ncontent-length: 2"), "{}", "malformed_request"),
        (
            format!("{CHAT}authorization: Bearer a\r\nauthorization: Bearer b\r\ncontent-length: 2"),
            "{}",
            "malformed_request",
        ),
        (format!("{CHAT}transfer-encoding: chunked"), "zz\r\n{}\r\n0\r\n\r\n", "malformed_body"),
        (format!("{CHAT}transfer-encoding: chunked"), "ffffffffffffffff\r\n{}\r\n", "malformed_body"),
    ] {
        let seen = to_the_end(&gateway, format!("{head}\r\n\r\n{body}").as_bytes()).await;
        assert!(seen.starts_with("HTTP/1.1 400 ") && seen.contains(code), "{head}: {seen}");
        assert!(seen.contains("\"error\"") && seen.matches("HTTP/1.1 ").count() == 1, "{seen}");
    }
    let mut client = gateway.connect().await;
    client.write_all(format!("{CHAT}transfer-encoding: chunked\r\n\r\n{chunked}").as_bytes()).await.unwrap();
    assert_eq!(answer(&mut client, &mut Vec::new()).await.0, 200, "one `chunked` is good");
    assert!(
        gateway.metrics().await.contains("tandem_gateway_heads_refused_total{error_code=\"malformed_request\"} 15")
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn heads_have_a_limit() {
    let w = Worker::start("null", well).await;
    let gateway = plain(&w, |a| a.listen.max_header_size = Some(8192)).await;
    let padded = |bytes: usize| format!("{CHAT}x: {}\r\ncontent-length: 2\r\n\r\n{{}}", "a".repeat(bytes));
    let mut client = gateway.connect().await;
    client.write_all(padded(7000).as_bytes()).await.unwrap();
    assert_eq!(answer(&mut client, &mut Vec::new()).await.0, 200);
    for bytes in [8192, 500_000] {
        let seen = to_the_end(&gateway, padded(bytes).as_bytes()).await;
        assert!(seen.starts_with("HTTP/1.1 431 ") && seen.contains("head_too_large"), "{seen}");
    }
    let many: String = (0..300).map(|i| format!("x-{i}: 1\r\n")).collect();
    let seen = to_the_end(&gateway, format!("{CHAT}{many}\r\n").as_bytes()).await;
    assert!(seen.starts_with("HTTP/1.1 431 ") && seen.contains("256"), "{seen}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_head_is_told_and_a_silent_connection_is_closed() {
    let w = Worker::start("null", well).await;
    let gateway = plain(&w, |a| a.deadlines.client_read_timeout_secs = Some(1)).await;
    assert_eq!(to_the_end(&gateway, b"").await, "");
    let began = Instant::now();
    let seen = to_the_end(&gateway, CHAT.as_bytes()).await;
    assert!(seen.starts_with("HTTP/1.1 408 ") && seen.contains("client_head_timeout"), "{seen}");
    assert!(began.elapsed() >= Duration::from_secs(1));
    // The second request of a connection has the same rights, also where its first bytes came with the first request.
    let (first, begun) = (chat("{}"), "POST /v1/ch");
    let seen = to_the_end(&gateway, format!("{first}{begun}").as_bytes()).await;
    assert!(seen.starts_with("HTTP/1.1 200 ") && seen.contains("HTTP/1.1 408 "), "{seen}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_body_is_drained_for_a_moment_and_the_answer_arrives() {
    let w = Worker::start("null", well).await;
    let gateway = plain(&w, |a| a.listen.max_payload_size = Some(1 << 20)).await;
    // Both send more than any buffer holds before they read.
    for framing in ["content-length: 8388608\r\n\r\n", "transfer-encoding: chunked\r\n\r\n800000\r\n"] {
        let client = gateway.connect().await;
        let (mut read, mut write) = client.into_split();
        write.write_all(format!("{CHAT}{framing}").as_bytes()).await.unwrap();
        let sending = tokio::spawn(async move {
            write.write_all(&vec![b'x'; 8 << 20]).await.expect("the rest of the body is taken");
            write
        });
        let _write = within("the body's end", sending).await.unwrap();
        let mut seen = Vec::new();
        let (status, head, body) = answer(&mut read, &mut seen).await;
        assert_eq!(status, 413);
        assert!(head.contains("x-request-id: ") && String::from_utf8(body).unwrap().contains("payload_too_large"));
        assert_eq!(within("the close", read.read_buf(&mut seen)).await.unwrap(), 0);
    }
    // A body without an end costs no more than the wait.
    let mut client = gateway.connect().await;
    client.write_all(format!("{CHAT}content-length: 99999999\r\n\r\n").as_bytes()).await.unwrap();
    let began = Instant::now();
    let mut seen = Vec::new();
    assert_eq!(answer(&mut client, &mut seen).await.0, 413);
    assert_eq!(within("the close", client.read_buf(&mut seen)).await.unwrap(), 0);
    assert!(began.elapsed() < Duration::from_secs(10));
}

#[tokio::test(flavor = "multi_thread")]
async fn expectations_wait_for_head_and_limits() {
    let w = Worker::start("null", well).await;
    let gateway = plain(&w, |a| a.security.api_key = Some("k".into())).await;
    let ask = |extra: &str| format!("{CHAT}expect: 100-continue\r\n{extra}\r\n\r\n");
    for (extra, status) in [
        ("content-length: 2", "401"),
        ("authorization: Bearer k\r\ncontent-length: 99999999", "413"),
        ("authorization: Bearer k\r\ncontent-encoding: gzip\r\ncontent-length: 2", "415"),
        ("authorization: Bearer k\r\nexpect: 200-ok\r\ncontent-length: 2", "417"),
    ] {
        let mut client = gateway.connect().await;
        client.write_all(ask(extra).as_bytes()).await.unwrap();
        let mut seen = vec![0; 12];
        within("a refusal before the body", client.read_exact(&mut seen)).await.unwrap();
        assert_eq!(seen, format!("HTTP/1.1 {status}").into_bytes(), "{extra}");
    }
    let mut client = gateway.connect().await;
    client.write_all(ask("authorization: Bearer k\r\ncontent-length: 2").as_bytes()).await.unwrap();
    let mut seen = vec![0; 25];
    within("the interim answer", client.read_exact(&mut seen)).await.unwrap();
    assert_eq!(seen, b"HTTP/1.1 100 Continue\r\n\r\n");
    client.write_all(b"{}").await.unwrap();
    assert_eq!(answer(&mut client, &mut Vec::new()).await.0, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn large_bodies_pass_and_compressed_ones_do_not() {
    let mut w = Worker::start("null", well).await;
    let gateway = plain(&w, |a| a.listen.max_payload_size = Some(64 << 20)).await;
    for bytes in [3 << 20, (64 << 20) - 64] {
        let body = json!({"messages": [{"content": "x".repeat(bytes)}]}).to_string();
        let (sent, status) = (body.len(), gateway.post("/v1/chat/completions", body).await.status());
        assert_eq!((status.as_u16(), w.next().await.body.len()), (200, sent));
    }
    let (status, code, _) = error_of(gateway.post("/v1/chat/completions", vec![b'x'; (64 << 20) + 1]).await).await;
    assert_eq!((status, code.as_str()), (413, "payload_too_large"));
    let gzip = gateway.client.post(gateway.url("/generate")).header("content-encoding", "gzip").body("{}").send();
    let (status, code, _) = error_of(gzip.await.unwrap()).await;
    assert_eq!((status, code.as_str()), (415, "unsupported_content_encoding"));
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_beyond_the_cap_are_told_and_places_come_back() {
    let w = Worker::start("null", well).await;
    let gateway = plain(&w, |a| a.listen.max_connections = Some(3)).await;
    let until_open = async |wanted: usize| {
        let deadline = Instant::now() + LIMIT;
        let line = format!("smg_http_connections_active {wanted}");
        while !gateway.metrics().await.contains(&line) {
            assert!(Instant::now() < deadline, "{line}");
        }
    };
    // The one that asked for readiness is idle in its client's pool.
    until_open(1).await;
    let held: Vec<TcpStream> = vec![gateway.connect().await, gateway.connect().await];
    until_open(3).await;
    let seen = to_the_end(&gateway, chat("{}").as_bytes()).await;
    assert!(seen.starts_with("HTTP/1.1 503 ") && seen.contains("too_many_connections"), "{seen}");
    assert!(seen.to_ascii_lowercase().contains("retry-after: "), "{seen}");
    drop(held);
    until_open(1).await;
    let mut client = gateway.connect().await;
    client.write_all(chat("{}").as_bytes()).await.unwrap();
    assert_eq!(answer(&mut client, &mut Vec::new()).await.0, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn ids_and_traces_go_in_and_out() {
    let mut w = Worker::start("null", well).await;
    let gateway = plain(&w, |_| {}).await;
    let trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    for (name, given, kept) in [
        ("x-request-id", "mine-1", true),
        ("x-correlation-id", "mine-2", true),
        ("request-id", "mine-3", true),
        ("x-request-id", "not an id", false),
        ("x-request-id", "", false),
    ] {
        let asked = gateway.client.post(gateway.url("/v1/chat/completions")).body("{}");
        let sent = asked.header(name, given).header("traceparent", trace).header("tracestate", "a=b").send();
        let answer = within("an answer", sent).await.unwrap();
        let id = answer.headers()["x-request-id"].to_str().unwrap().to_owned();
        assert_eq!(id == given, kept, "{name}: {given:?} became {id:?}");
        let head = w.next().await.head;
        assert!(head.contains(&format!("x-request-id: {id}\r\n")), "{head}");
        assert!(head.contains(&format!("traceparent: {trace}\r\ntracestate: a=b\r\n")), "{head}");
    }
    let health = gateway.client.get(gateway.url("/health")).header("x-request-id", "mine").send().await.unwrap();
    assert_eq!(health.headers()["x-request-id"], "mine");
}

#[tokio::test(flavor = "multi_thread")]
async fn legs_get_a_fresh_head() {
    let mut w = Worker::start("null", well).await;
    let gateway = plain(&w, |_| {}).await;
    let mut client = gateway.connect().await;
    let odd = "connection: keep-alive, x-secret\r\nx-secret: 1\r\ncookie: c\r\nte: trailers\r\nupgrade: h2c\r\n\
               x-forwarded-host: evil\r\nproxy-authorization: p\r\nbootstrap-host: evil\r\n";
    client
        .write_all(
            format!("{CHAT}{odd}transfer-encoding: chunked\r\n\r\n2\r\n{{}}\r\n0\r\nx: trailer\r\n\r\n").as_bytes(),
        )
        .await
        .unwrap();
    assert_eq!(answer(&mut client, &mut Vec::new()).await.0, 200);
    let head = w.next().await.head;
    let names: Vec<&str> = head.lines().skip(1).filter_map(|l| Some(l.split_once(':')?.0)).collect();
    assert_eq!(names, ["host", "content-type", "content-length", "x-request-id"], "{head}");
    assert!(head.contains(&format!("host: {}\r\n", w.address)) && head.contains("content-length: 2\r\n"), "{head}");
}

#[tokio::test(flavor = "multi_thread")]
async fn series_do_not_grow_with_what_clients_invent() {
    let w = Worker::start("null", well).await;
    let gateway = plain(&w, |_| {}).await;
    let count = async || gateway.metrics().await.lines().count();
    let ask = async |from: usize, to: usize| {
        let mut client = gateway.connect().await;
        let mut seen = Vec::new();
        for i in from..to {
            let body = format!(r#"{{"model":"m{i}","messages":[]}}"#);
            let request = format!("PUT /path-{i} HTTP/1.1\r\nhost: x\r\nx-request-id: {i}\r\n\r\n{}", chat(&body));
            client.write_all(request.as_bytes()).await.unwrap();
            answer(&mut client, &mut seen).await;
            answer(&mut client, &mut seen).await;
        }
    };
    ask(0, 2).await;
    let before = count().await;
    ask(2, 1000).await;
    assert_eq!(count().await, before);
}
