//! HTTP/2 and TLS between clients and the gateway, and TLS towards workers.

mod support;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use serde_json::json;
use support::*;
use tandem_gateway::GatewayArgs;
use tokio::sync::{mpsc, watch};

/// An authority and what it signed, as files.
struct Authority {
    dir: tempfile::TempDir,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("ca.pem"), pem).unwrap();
        Authority { dir, issuer: Issuer::new(params, key) }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Writes `name.pem` and `name.key`, valid for localhost.
    fn sign(&self, name: &str) {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec!["localhost".to_owned(), "127.0.0.1".to_owned()]).unwrap();
        let cert = params.signed_by(&key, &self.issuer).unwrap();
        std::fs::write(self.path(&format!("{name}.key")), key.serialize_pem()).unwrap();
        std::fs::write(self.path(&format!("{name}.pem")), cert.pem()).unwrap();
    }

    fn root(&self) -> reqwest::Certificate {
        reqwest::Certificate::from_pem(&std::fs::read(self.path("ca.pem")).unwrap()).unwrap()
    }

    fn identity(&self, name: &str) -> reqwest::Identity {
        let pem =
            [self.path(&format!("{name}.pem")), self.path(&format!("{name}.key"))].map(|p| std::fs::read(p).unwrap());
        reqwest::Identity::from_pem(&pem.concat()).unwrap()
    }

    fn client(&self) -> reqwest::ClientBuilder {
        let client = reqwest::Client::builder().no_proxy().timeout(LIMIT);
        client.tls_built_in_root_certs(false).add_root_certificate(self.root())
    }
}

/// How a client reaches the gateway over HTTP/2.
#[derive(Clone, Copy, Debug)]
enum Way {
    Tls,
    Plain,
}

const WAYS: [Way; 2] = [Way::Tls, Way::Plain];

/// A gateway in front of `worker` and an HTTP/2 client of it with small windows.
async fn start(way: Way, authority: &Authority, worker: &Worker) -> (Gateway, reqwest::Client, String) {
    let mut args = with(GatewayArgs::default(), |a| a.fleet.worker_urls = vec![worker.url()]);
    let small = |client: reqwest::ClientBuilder| {
        client.http2_initial_stream_window_size(65_535).http2_initial_connection_window_size(1 << 20)
    };
    let client = match way {
        Way::Tls => {
            authority.sign("server");
            args.security.tls_cert_path = Some(authority.path("server.pem"));
            args.security.tls_key_path = Some(authority.path("server.key"));
            small(authority.client())
        }
        Way::Plain => {
            args.listen.h2c = true;
            small(reqwest::Client::builder().no_proxy().timeout(LIMIT).http2_prior_knowledge())
        }
    };
    let gateway = Gateway::start(args).await;
    let scheme = if matches!(way, Way::Tls) { "https" } else { "http" };
    let url = format!("{scheme}://{}", gateway.addresses.data);
    let client = client.build().unwrap();
    until_ready(&client, &url).await;
    (gateway, client, url)
}

async fn until_ready(client: &reqwest::Client, url: &str) {
    let deadline = Instant::now() + LIMIT;
    loop {
        match client.get(format!("{url}/readiness")).send().await {
            Ok(answer) if answer.status() == 200 => return,
            other => assert!(Instant::now() < deadline, "{other:?}"),
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn chat(client: &reqwest::Client, url: &str, stream: bool) -> reqwest::RequestBuilder {
    client.post(format!("{url}/v1/chat/completions")).body(json!({"messages": [], "stream": stream}).to_string())
}

async fn until_idle(client: &reqwest::Client, url: &str) {
    let deadline = Instant::now() + LIMIT;
    loop {
        let workers: serde_json::Value =
            client.get(format!("{url}/workers")).send().await.unwrap().json().await.unwrap();
        if workers["workers"].as_array().unwrap().iter().all(|w| w["load"] == 0) {
            return;
        }
        assert!(Instant::now() < deadline, "{workers}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn http2_answers_streams_and_refuses() {
    for way in WAYS {
        let authority = Authority::new();
        let w = Worker::start("null", stream_well).await;
        let (gateway, client, url) = start(way, &authority, &w).await;
        let answer = chat(&client, &url, true).header("x-request-id", "mine").send().await.unwrap();
        assert_eq!((answer.version(), answer.status().as_u16()), (reqwest::Version::HTTP_2, 200), "{way:?}");
        assert_eq!(answer.headers()["x-request-id"], "mine");
        assert!(answer.text().await.unwrap().ends_with("[DONE]\n\n"));
        let (status, code, _) = error_of(client.get(format!("{url}/nowhere")).send().await.unwrap()).await;
        assert_eq!((status, code.as_str()), (404, "not_found"));
        let big = vec![b'x'; (32 << 20) + 1];
        // A client may learn of the refusal while it still sends.
        if let Ok(answer) = client.post(format!("{url}/generate")).body(big).send().await {
            assert_eq!(answer.status(), 413);
        }
        let half = vec![b' '; 8 << 20];
        let answer =
            client.post(format!("{url}/generate")).body([half.as_slice(), b"{}"].concat()).send().await.unwrap();
        assert!(answer.status().as_u16() == 200, "{}", answer.text().await.unwrap());
        drop(gateway);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_http2_client_that_leaves_ends_its_leg_and_no_other() {
    for way in WAYS {
        let authority = Authority::new();
        let (tell, mut told) = mpsc::channel(8);
        let (go, went) = watch::channel(false);
        let mut w = Worker::start("null", move |got, socket| {
            let (tell, mut went) = (tell.clone(), went.clone());
            async move {
                let mut socket = match got.json()["stream"] == true {
                    true => say(socket, format!("{SSE_HEAD}{}", chunk(&token("Pa")))).await?,
                    false => socket,
                };
                tokio::select! {
                    () = closed(&mut socket) => {
                        let _ = tell.try_send(());
                        return None;
                    }
                    _ = went.wait_for(|went| *went) => {}
                }
                say(socket, format!("{}0\r\n\r\n", chunk(&finish()))).await
            }
        })
        .await;
        let (_gateway, client, url) = start(way, &authority, &w).await;
        // One of the same connection that stays.
        let mut stays = within("a head", chat(&client, &url, true).send()).await.unwrap();
        w.next().await;
        within("a token", stays.chunk()).await.unwrap().unwrap();
        for streams in [true, false] {
            let asked = tokio::spawn(chat(&client, &url, streams).send());
            w.next().await;
            match streams {
                // In mid-stream, and before the first byte.
                true => {
                    let mut answer = within("a head", asked).await.unwrap().unwrap();
                    within("a token", answer.chunk()).await.unwrap().unwrap();
                    drop(answer);
                }
                false => asked.abort(),
            }
            within("the close of the leg", told.recv()).await.unwrap();
        }
        go.send(true).unwrap();
        assert!(within("the rest", stays.text()).await.unwrap().ends_with("[DONE]\n\n"), "{way:?}");
        until_idle(&client, &url).await;
        // The whole connection goes with its client.
        go.send(false).unwrap();
        let last = tokio::spawn(chat(&client, &url, true).send());
        w.next().await;
        drop((within("a head", last).await.unwrap().unwrap(), client));
        within("the close of the leg", told.recv()).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_http2_client_slows_its_worker_and_no_neighbour() {
    const EVENTS: usize = 1000;
    for way in WAYS {
        let authority = Authority::new();
        let (tell, sent) = watch::channel(0usize);
        let tell = std::sync::Arc::new(tell);
        let w = Worker::start("null", move |got, socket| {
            let tell = tell.clone();
            async move {
                if got.json()["stream"] != true {
                    return well(got, socket).await;
                }
                let mut socket = say(socket, SSE_HEAD).await?;
                let event = chunk(&token(&"x".repeat(32 * 1024)));
                for _ in 0..EVENTS {
                    socket = say(socket, &event).await?;
                    tell.send_modify(|n| *n += 1);
                }
                say(socket, format!("{}0\r\n\r\n", chunk(&finish()))).await
            }
        })
        .await;
        let (_gateway, client, url) = start(way, &authority, &w).await;
        let slow = within("a head", chat(&client, &url, true).send()).await.unwrap();
        let stalled = async {
            let mut before = 0;
            loop {
                tokio::time::sleep(Duration::from_millis(300)).await;
                let now = *sent.borrow();
                if now > 0 && now == before {
                    return now;
                }
                before = now;
            }
        };
        let at = within("the stall", stalled).await;
        assert!(at < EVENTS, "nothing held the worker back");
        let neighbour = within("a neighbour's answer", chat(&client, &url, false).send()).await.unwrap();
        assert_eq!(neighbour.status(), 200, "{way:?}");
        let rest = within("the rest", slow.bytes()).await.unwrap();
        assert!(rest.len() > EVENTS * 32 * 1024 && rest.ends_with(b"[DONE]\n\n"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn h2c_listeners_serve_http1_too() {
    let w = Worker::start("null", well).await;
    let args = with(GatewayArgs::default(), |a| {
        a.fleet.worker_urls = vec![w.url()];
        a.listen.h2c = true;
    });
    let gateway = Gateway::start(args).await;
    gateway.until_ready().await;
    let answer = gateway.chat(false).await;
    assert_eq!((answer.version(), answer.status().as_u16()), (reqwest::Version::HTTP_11, 200));
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_must_show_a_certificate_where_an_authority_is_named() {
    let (authority, stranger) = (Authority::new(), Authority::new());
    for (authority, name) in [(&authority, "server"), (&authority, "client"), (&stranger, "client")] {
        authority.sign(name);
    }
    let w = Worker::start("null", well).await;
    let args = with(GatewayArgs::default(), |a| {
        a.fleet.worker_urls = vec![w.url()];
        a.security.tls_cert_path = Some(authority.path("server.pem"));
        a.security.tls_key_path = Some(authority.path("server.key"));
        a.security.tls_client_ca_path = Some(authority.path("ca.pem"));
    });
    let gateway = Gateway::start(args).await;
    let url = format!("https://{}/health", gateway.addresses.data);
    let ask = async |client: reqwest::ClientBuilder| client.build().unwrap().get(&url).send().await;
    assert!(ask(authority.client()).await.is_err(), "no certificate");
    assert!(ask(authority.client().identity(stranger.identity("client"))).await.is_err(), "a stranger's");
    assert_eq!(ask(authority.client().identity(authority.identity("client"))).await.unwrap().status(), 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn renewed_certificates_are_taken_and_broken_ones_are_not() {
    let (old, new) = (Authority::new(), Authority::new());
    old.sign("server");
    new.sign("server");
    let w = Worker::start("null", well).await;
    let args = with(GatewayArgs::default(), |a| {
        a.fleet.worker_urls = vec![w.url()];
        a.security.tls_cert_path = Some(old.path("server.pem"));
        a.security.tls_key_path = Some(old.path("server.key"));
    });
    let gateway = Gateway::start(args).await;
    let url = format!("https://{}/health", gateway.addresses.data);
    let ask = async |authority: &Authority| authority.client().build().unwrap().get(&url).send().await;
    assert!(ask(&old).await.is_ok() && ask(&new).await.is_err());
    // A certificate whose key has not come yet.
    std::fs::copy(new.path("server.pem"), old.path("server.pem")).unwrap();
    let deadline = Instant::now() + Duration::from_millis(2500);
    while Instant::now() < deadline {
        assert!(ask(&old).await.is_ok(), "the old pair stays");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    std::fs::copy(new.path("server.key"), old.path("server.key")).unwrap();
    let deadline = Instant::now() + LIMIT;
    while ask(&new).await.is_err() {
        assert!(Instant::now() < deadline, "the new pair is not taken");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_over_tls_are_trusted_by_their_authority_and_shown_a_certificate() {
    let (authority, stranger) = (Authority::new(), Authority::new());
    authority.sign("server");
    authority.sign("gateway");
    // A worker with TLS: another gateway, which asks for certificates.
    let w = Worker::start("null", well).await;
    let back = Gateway::start(with(GatewayArgs::default(), |a| {
        a.fleet.worker_urls = vec![w.url()];
        a.security.tls_cert_path = Some(authority.path("server.pem"));
        a.security.tls_key_path = Some(authority.path("server.key"));
        a.security.tls_client_ca_path = Some(authority.path("ca.pem"));
    }))
    .await;
    let shows = authority.client().identity(authority.identity("gateway")).build().unwrap();
    let back_url = format!("https://{}", back.addresses.data);
    until_ready(&shows, &back_url).await;
    let front = async |ca: PathBuf, shows: bool| {
        Gateway::start(with(GatewayArgs::default(), |a| {
            a.fleet.worker_urls = vec![back_url.clone()];
            a.security.ca_cert_paths = vec![ca.display().to_string()];
            a.security.client_cert_path = shows.then(|| authority.path("gateway.pem"));
            a.security.client_key_path = shows.then(|| authority.path("gateway.key"));
        }))
        .await
    };
    let good = front(authority.path("ca.pem"), true).await;
    good.until_ready().await;
    assert_eq!(good.chat(false).await.status(), 200);
    for bad in [front(stranger.path("ca.pem"), true).await, front(authority.path("ca.pem"), false).await] {
        let (status, _, _) = error_of(bad.chat(false).await).await;
        assert!(status >= 502, "{status}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn operators_may_have_a_listener_of_their_own() {
    let w = Worker::start("null", well).await;
    let args = with(GatewayArgs::default(), |a| {
        a.fleet.worker_urls = vec![w.url()];
        a.listen.admin_port = Some(0);
        a.security.admin_api_key = Some("sk-admin".into());
    });
    let gateway = Gateway::start(args).await;
    gateway.until_ready().await;
    let admin = format!("http://{}", gateway.addresses.admin.unwrap());
    let ask =
        async |url: String, key: &str| gateway.client.get(url).bearer_auth(key).send().await.unwrap().status().as_u16();
    assert_eq!(ask(gateway.url("/workers"), "sk-admin").await, 404, "not on the data listener");
    assert_eq!(
        (ask(format!("{admin}/workers"), "sk-admin").await, ask(format!("{admin}/workers"), "").await),
        (200, 401)
    );
    assert_eq!((ask(format!("{admin}/health"), "").await, ask(format!("{admin}/v1/models"), "").await), (200, 401));
    assert_eq!(gateway.client.post(format!("{admin}/generate")).body("{}").send().await.unwrap().status(), 404);
    assert_eq!(gateway.chat(false).await.status(), 200);
}
