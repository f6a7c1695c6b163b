//! The fleet's members over HTTP, in sglang_router's shapes: list, show, add, change and remove workers. An order is checked
//! with words, entered into the registry, and answered with 202: the worker's own task does the rest. Also the older
//! `/add_worker`, `/remove_worker` and `/list_workers`.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, header};
use pingora::protocols::http::ServerSession;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::config::{Role, Secret, WorkerSpec};
use crate::door::reply::{self, Done};
use crate::fleet::{Change, Fleet, Worker};

/// What is asked of the registry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Order {
    List,
    Show,
    Add,
    Change,
    Remove,
    /// `POST /add_worker?url=`.
    AddUrl,
    /// `POST /remove_worker?url=`.
    RemoveUrl,
    ListUrls,
}

/// An answer: JSON, or the plain text of the older endpoints.
struct Reply {
    status: u16,
    body: Value,
    location: Option<String>,
}

impl Reply {
    fn new(status: u16, body: Value) -> Self {
        Reply { status, body, location: None }
    }

    fn refused(status: u16, code: &str, why: impl Into<String>) -> Self {
        Reply::new(status, json!({"error": why.into(), "code": code}))
    }
}

pub async fn answer(fleet: &Fleet, session: &mut ServerSession, order: Order, body: Bytes) -> Done {
    let uri = session.req_header().uri.clone();
    let made = carry_out(fleet, order, uri.path(), uri.query().unwrap_or(""), &body);
    let Reply { status, body, location } = made.unwrap_or_else(|refusal| refusal);
    let mut headers = HeaderMap::new();
    if let Some(location) = location.and_then(|path| HeaderValue::from_str(&path).ok()) {
        headers.insert(header::LOCATION, location);
    }
    match body {
        Value::String(text) => reply::whole(session, status, "text/plain", headers, Bytes::from(text)).await,
        body => reply::whole(session, status, "application/json", headers, Bytes::from(body.to_string())).await,
    }
}

fn carry_out(fleet: &Fleet, order: Order, path: &str, query: &str, body: &[u8]) -> Result<Reply, Reply> {
    match order {
        Order::List => Ok(Reply::new(200, list(fleet))),
        Order::Show => Ok(Reply::new(200, describe(&*named(fleet, path)?))),
        Order::Add => add(fleet, body),
        Order::Change => {
            let worker = named(fleet, path)?;
            let given = Given::read(body)?;
            if given.url.is_some_and(|url| url != worker.url()) {
                let why = "a worker's URL cannot be changed; remove it and add the other one";
                return Err(Reply::refused(400, "BAD_REQUEST", why));
            }
            fleet.change(worker.url(), given.rest.change()?);
            Ok(accepted(worker.uuid(), worker.url(), "the change is entered"))
        }
        Order::Remove => {
            let worker = named(fleet, path)?;
            fleet.remove(worker.url());
            Ok(accepted(
                worker.uuid(),
                worker.url(),
                "no new requests go there; it is gone once its running ones ended",
            ))
        }
        Order::AddUrl => add_url(fleet, query),
        Order::RemoveUrl => {
            let url = asked_url(query)?;
            let known = fleet.snapshot().workers.iter().any(|w| w.url() == url && !w.is_draining());
            if !known {
                return Err(Reply::refused(404, "WORKER_NOT_FOUND", format!("there is no worker {url}")));
            }
            fleet.remove(&url);
            Ok(Reply::new(200, format!("Successfully removed worker: {url}").into()))
        }
        Order::ListUrls => {
            let snapshot = fleet.snapshot();
            let urls: Vec<&str> = snapshot.workers.iter().filter(|w| !w.is_draining()).map(|w| w.url()).collect();
            Ok(Reply::new(200, json!({"urls": urls})))
        }
    }
}

fn list(fleet: &Fleet) -> Value {
    let snapshot = fleet.snapshot();
    let all: Vec<Value> = snapshot.workers.iter().map(|w| describe(w)).collect();
    let count = |role| snapshot.workers.iter().filter(|w| w.spec.role == role).count();
    let stats = json!({
        "prefill_count": count(Role::Prefill), "decode_count": count(Role::Decode), "regular_count": count(Role::Plain),
    });
    json!({"workers": all, "total": all.len(), "stats": stats})
}

/// One worker, without its key.
fn describe(worker: &Worker) -> Value {
    let (healthy, load) = (worker.is_healthy(), worker.load());
    let sources: Vec<_> = worker.sources.iter().map(|source| source.name()).collect();
    json!({
        "id": worker.uuid(),
        "url": worker.url(),
        "model_id": worker.models().first(),
        "models": worker.models(),
        "worker_type": worker.spec.role.worker_type(),
        "is_healthy": healthy,
        "health": if healthy { "healthy" } else { "unhealthy" },
        "reason": (!healthy).then(|| worker.health().reason().to_owned()),
        "state": if worker.is_draining() { "draining" } else { "active" },
        "circuit_breaker": worker.live().breaker_state().name(),
        "load": load.legs,
        "reported_tokens": load.tokens,
        "connection_mode": "http",
        "bootstrap_port": worker.bootstrap_port().filter(|_| worker.spec.role == Role::Prefill),
        "dp_size": worker.facts.dp_size,
        "metadata": worker.spec.labels,
        "sources": sources,
    })
}

fn accepted(uuid: &str, url: &str, message: &str) -> Reply {
    let location = format!("/workers/{uuid}");
    let body = json!({
        "status": "accepted", "worker_id": uuid, "url": url, "location": location, "message": message,
    });
    Reply { status: 202, body, location: Some(location) }
}

/// The worker that `/workers/{id}` names.
fn named(fleet: &Fleet, path: &str) -> Result<Arc<Worker>, Reply> {
    let id = path.rsplit('/').next().unwrap_or("").to_ascii_lowercase();
    let is_uuid = id.len() == 36
        && id.bytes().enumerate().all(|(at, byte)| match at {
            8 | 13 | 18 | 23 => byte == b'-',
            _ => byte.is_ascii_hexdigit(),
        });
    if !is_uuid {
        return Err(Reply::refused(400, "BAD_REQUEST", "a worker's id is a UUID; GET /workers lists them"));
    }
    let unknown =
        || Reply::refused(404, "WORKER_NOT_FOUND", format!("there is no worker {id}; GET /workers lists them"));
    fleet.snapshot().worker(&id).cloned().ok_or_else(unknown)
}

/// Fields of sglang_router's requests that change nothing here: health checks and breakers are set for the whole fleet,
/// prompts are rendered by the workers, and load decides instead of priority and cost.
const WITHOUT_EFFECT: [&str; 14] = [
    "priority",
    "cost",
    "runtime",
    "connection_mode",
    "tokenizer_path",
    "reasoning_parser",
    "tool_parser",
    "chat_template",
    "health_check_timeout_secs",
    "health_check_interval_secs",
    "health_success_threshold",
    "health_failure_threshold",
    "disable_health_check",
    "max_connection_attempts",
];

/// The body of an order.
struct Given {
    url: Option<String>,
    rest: Fields,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields)]
struct Fields {
    worker_type: Option<String>,
    bootstrap_port: Option<u16>,
    model_id: Option<String>,
    api_key: Option<String>,
    labels: Option<BTreeMap<String, String>>,
}

impl Given {
    fn read(body: &[u8]) -> Result<Given, Reply> {
        let bad = |why: String| Reply::refused(400, "BAD_REQUEST", format!("the body is no such order: {why}"));
        let mut fields: serde_json::Map<String, Value> =
            serde_json::from_slice(body).map_err(|error| bad(error.to_string()))?;
        fields.retain(|name, _| !WITHOUT_EFFECT.contains(&name.as_str()));
        let url = match fields.remove("url") {
            None | Some(Value::Null) => None,
            Some(Value::String(url)) => Some(url),
            Some(_) => return Err(bad("`url` is no string".into())),
        };
        let rest = Fields::deserialize(Value::Object(fields)).map_err(|error| bad(error.to_string()))?;
        Ok(Given { url, rest })
    }
}

impl Fields {
    fn role(&self) -> Result<Option<Role>, Reply> {
        let Some(word) = &self.worker_type else { return Ok(None) };
        match word.as_str() {
            "prefill" => Ok(Some(Role::Prefill)),
            "decode" => Ok(Some(Role::Decode)),
            "regular" | "plain" => Ok(Some(Role::Plain)),
            _ => {
                let why = format!("`worker_type` {word:?} is none of prefill, decode and regular");
                Err(Reply::refused(400, "BAD_REQUEST", why))
            }
        }
    }

    fn change(self) -> Result<Change, Reply> {
        Ok(Change {
            role: self.role()?,
            bootstrap_port: self.bootstrap_port.filter(|port| *port > 0),
            model: self.model_id,
            api_key: self.api_key.map(Secret),
            labels: self.labels,
        })
    }

    fn spec(self, url: &str) -> Result<WorkerSpec, Reply> {
        let role = self.role()?.unwrap_or(Role::Plain);
        let spec = WorkerSpec::new(url, role).map_err(|why| Reply::refused(400, "BAD_REQUEST", why))?;
        Ok(self.change()?.of(&spec))
    }
}

fn add(fleet: &Fleet, body: &[u8]) -> Result<Reply, Reply> {
    let Given { url, rest } = Given::read(body)?;
    let Some(url) = url else { return Err(Reply::refused(400, "BAD_REQUEST", "`url` is missing")) };
    let spec = rest.spec(&url)?;
    enter(fleet, spec.clone())?;
    let snapshot = fleet.snapshot();
    // Another order may have removed it already.
    let uuid = snapshot.workers.iter().find(|w| w.url() == spec.url).map_or("", |w| w.uuid());
    Ok(accepted(uuid, &spec.url, "the worker is entered; it serves once it is healthy"))
}

fn add_url(fleet: &Fleet, query: &str) -> Result<Reply, Reply> {
    let url = asked_url(query)?;
    let fields: serde_json::Map<String, Value> = pairs(query)
        .filter(|(name, _)| name != "url")
        .map(|(name, value)| match (name.as_ref(), value.parse::<u16>()) {
            ("bootstrap_port", Ok(port)) => (name.into_owned(), port.into()),
            _ => (name.into_owned(), value.into_owned().into()),
        })
        .collect();
    let fields = Given::read(Value::Object(fields).to_string().as_bytes())?.rest;
    enter(fleet, fields.spec(&url)?)?;
    Ok(Reply::new(200, format!("Successfully added worker: {url}").into()))
}

/// A worker that serves already may be named again, but not as another one.
fn enter(fleet: &Fleet, spec: WorkerSpec) -> Result<(), Reply> {
    let snapshot = fleet.snapshot();
    let serving = snapshot.workers.iter().find(|w| w.url() == spec.url && !w.is_draining());
    if let Some(worker) = serving.filter(|w| w.spec.role != spec.role) {
        let (is, id) = (worker.spec.role.worker_type(), worker.uuid());
        let why = format!("{} is in the fleet as a {is} worker; change it by PUT /workers/{id}", spec.url);
        return Err(Reply::refused(409, "WORKER_EXISTS", why));
    }
    fleet.add(spec);
    Ok(())
}

fn pairs(query: &str) -> impl Iterator<Item = (Cow<'_, str>, Cow<'_, str>)> {
    url::form_urlencoded::parse(query.as_bytes())
}

/// `?url=`, as workers are named here.
fn asked_url(query: &str) -> Result<String, Reply> {
    let bad = |why: String| Reply::refused(400, "BAD_REQUEST", why);
    let given = pairs(query).find(|(name, _)| name == "url").map(|(_, url)| url);
    let given = given.ok_or_else(|| bad("say which worker: ?url=http://host:port".into()))?;
    WorkerSpec::new(&given, Role::Plain).map(|spec| spec.url).map_err(bad)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::config;

    fn fleet() -> Fleet {
        Fleet::new(&config("--prefill http://p:1 8998 --decode http://d:1").unwrap())
    }

    fn ordered(fleet: &Fleet, order: Order, path: &str, body: &str) -> (u16, Value) {
        let made = carry_out(fleet, order, path, "", body.as_bytes()).unwrap_or_else(|refusal| refusal);
        (made.status, made.body)
    }

    fn asked(fleet: &Fleet, order: Order, query: &str) -> (u16, Value) {
        let made = carry_out(fleet, order, "", query, b"").unwrap_or_else(|refusal| refusal);
        (made.status, made.body)
    }

    #[test]
    fn a_workers_life() {
        let fleet = fleet();
        let body = r#"{"url":"http://w:1/","model_id":"m","labels":{"a":"b"},"api_key":"k","priority":3}"#;
        let (status, accepted) = ordered(&fleet, Order::Add, "/workers", body);
        assert_eq!((status, &accepted["status"]), (202, &json!("accepted")));
        let at = accepted["location"].as_str().unwrap().to_owned();
        let (status, shown) = ordered(&fleet, Order::Show, &at, "");
        assert_eq!((status, &shown["url"], &shown["model_id"]), (200, &json!("http://w:1"), &json!("m")));
        assert!(shown["metadata"]["a"] == "b" && !shown.to_string().contains("\"k\""), "{shown}");
        let change = r#"{"worker_type":"prefill","bootstrap_port":9}"#;
        assert_eq!(ordered(&fleet, Order::Change, &at, change).0, 202);
        let (_, shown) = ordered(&fleet, Order::Show, &at, "");
        assert_eq!((&shown["worker_type"], &shown["bootstrap_port"]), (&json!("prefill"), &json!(9)));
        assert_eq!(ordered(&fleet, Order::Remove, &at, "").0, 202);
        assert_eq!(ordered(&fleet, Order::Show, &at, "").1["code"], "WORKER_NOT_FOUND");
        assert_eq!(ordered(&fleet, Order::List, "", "").1["total"], 2);
    }

    #[test]
    fn refusals_say_what_is_wrong() {
        let fleet = fleet();
        let url = "http://w:1";
        for (body, expected) in [
            ("{}".into(), "`url` is missing"),
            ("[]".into(), "no such order"),
            (json!({"url": "w:1"}).to_string(), "scheme"),
            (json!({"url": url, "worker_typ": "decode"}).to_string(), "worker_typ"),
            (json!({"url": url, "worker_type": "x"}).to_string(), "none of prefill, decode and regular"),
            (json!({"url": url, "bootstrap_port": 70000}).to_string(), "70000"),
        ] {
            let (status, answer) = ordered(&fleet, Order::Add, "/workers", &body);
            let words = answer["error"].as_str().unwrap();
            assert!(status == 400 && words.contains(expected), "{body}: {words}");
        }
        let same = json!({"url": "http://p:1", "worker_type": "decode"}).to_string();
        assert_eq!(ordered(&fleet, Order::Add, "/workers", &same).0, 409);
        assert_eq!(ordered(&fleet, Order::Show, "/workers/7", "").0, 400);
        let none = "/workers/00000000-0000-8000-8000-000000000000";
        assert_eq!(ordered(&fleet, Order::Remove, none, "").0, 404);
        let p = ordered(&fleet, Order::List, "", "").1["workers"][0]["id"].as_str().unwrap().to_owned();
        let (status, answer) = ordered(&fleet, Order::Change, &format!("/workers/{p}"), r#"{"url":"http://q:1"}"#);
        assert!(status == 400 && answer["error"].as_str().unwrap().contains("cannot be changed"));
    }

    #[test]
    fn the_older_endpoints() {
        let fleet = fleet();
        let query = "url=http%3A%2F%2Fq%3A1&worker_type=prefill&bootstrap_port=7";
        assert_eq!(asked(&fleet, Order::AddUrl, query), (200, json!("Successfully added worker: http://q:1")));
        let urls = json!({"urls": ["http://p:1", "http://d:1", "http://q:1"]});
        assert_eq!(asked(&fleet, Order::ListUrls, ""), (200, urls));
        assert_eq!(fleet.snapshot().workers[2].bootstrap_port(), Some(7));
        assert_eq!(asked(&fleet, Order::RemoveUrl, "url=http://d:1").0, 200);
        assert_eq!(asked(&fleet, Order::RemoveUrl, "url=http://d:1").0, 404);
        assert_eq!(asked(&fleet, Order::RemoveUrl, "").0, 400);
        assert_eq!(asked(&fleet, Order::AddUrl, "url=http://q:2&x=1").0, 400);
    }
}
