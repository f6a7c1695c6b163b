//! Who asks: keys as they are configured, found by their hashes in time that does not depend on which one it is, and what
//! each may do. A key itself is never kept, only its SHA-256, and never written anywhere. *Pure* but for counters.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use http::{HeaderMap, header};
use sha2::{Digest, Sha256};

use crate::config::{Class, KeySpec, RateSpec};
use crate::error::{Blame, Failure};

/// What a route asks of a key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Right {
    Nobody,
    Data,
    Admin,
}

/// All keys of a gateway.
#[derive(Debug, Default)]
pub struct Keyring {
    keys: Vec<Arc<Key>>,
}

/// One key, and what is going on under it.
#[derive(Debug)]
pub struct Key {
    pub spec: KeySpec,
    bucket: Option<Mutex<Bucket>>,
    running: AtomicUsize,
}

impl Keyring {
    /// The keys of `specs`; what goes on under a name in `before` counts on.
    pub fn new(specs: &[KeySpec], before: &Keyring, now: Instant) -> Self {
        let keep = |spec: &KeySpec| {
            let old = before.keys.iter().find(|key| key.spec == *spec);
            old.cloned().unwrap_or_else(|| Arc::new(Key::new(spec.clone(), now)))
        };
        Keyring { keys: specs.iter().map(keep).collect() }
    }

    /// The key that the headers present, if `right` asks for one. 401 without a good one, 403 where it may not do this.
    ///
    /// Without any key for the data plane everybody may use it; without any key at all, everything.
    pub fn authorize(&self, headers: &HeaderMap, right: Right) -> Result<Option<Arc<Key>>, Failure> {
        let needed = match right {
            Right::Nobody => false,
            Right::Data => self.keys.iter().any(|key| key.spec.data),
            Right::Admin => !self.keys.is_empty(),
        };
        if !needed {
            return Ok(None);
        }
        let Some(key) = presented(headers).and_then(|given| self.find(given)) else {
            let what = "send a key of this gateway as `Authorization: Bearer KEY`";
            return Err(Failure::client(401, "invalid_api_key", what));
        };
        match right {
            Right::Admin if !key.spec.admin => Err(forbidden("this key may not administer the gateway")),
            Right::Data if !key.spec.data => Err(forbidden("this key is for administering only")),
            _ => Ok(Some(key.clone())),
        }
    }

    /// Looks at every key, whichever fits, so that time tells nothing.
    fn find(&self, given: &[u8]) -> Option<&Arc<Key>> {
        let digest: [u8; 32] = Sha256::digest(given).into();
        let mut found = None;
        for (i, key) in self.keys.iter().enumerate() {
            let differs = digest.iter().zip(&key.spec.sha256).fold(0, |bits, (a, b)| bits | (a ^ b));
            if std::hint::black_box(differs) == 0 {
                found = Some(i);
            }
        }
        found.map(|i| &self.keys[i])
    }
}

/// The key that a client shows: OpenAI's header or Anthropic's.
fn presented(headers: &HeaderMap) -> Option<&[u8]> {
    match headers.get(header::AUTHORIZATION) {
        Some(value) => {
            let (scheme, key) = value.as_bytes().split_at_checked(7)?;
            scheme.eq_ignore_ascii_case(b"bearer ").then(|| key.trim_ascii())
        }
        None => Some(headers.get("x-api-key")?.as_bytes()),
    }
}

fn forbidden(what: &str) -> Failure {
    Failure::client(403, "forbidden", what)
}

impl Key {
    fn new(spec: KeySpec, now: Instant) -> Self {
        let bucket = spec.rate.map(|rate| Mutex::new(Bucket::new(rate, now)));
        Key { spec, bucket, running: AtomicUsize::new(0) }
    }

    pub fn name(&self) -> &str {
        &self.spec.name
    }

    /// Counts a request under this key until the permit is dropped; 429 beyond its rate or its concurrency.
    pub fn enter(self: &Arc<Self>, now: Instant) -> Result<KeyPermit, Failure> {
        let permit = KeyPermit(self.clone());
        let before = self.running.fetch_add(1, Relaxed);
        if let Some(max) = self.spec.concurrent_max.filter(|max| before >= *max) {
            let what = format!("this key has {max} requests running, its limit; retry when one ended");
            return Err(limited("key_concurrency", what, Duration::from_secs(1)));
        }
        if let Some(bucket) = &self.bucket {
            let taken = bucket.lock().expect("no panic under this lock").take(now);
            taken.map_err(|wait| limited("key_rate", "this key's rate of requests is used up".into(), wait))?;
        }
        Ok(permit)
    }

    /// 403 for a model that is not this key's.
    pub fn allows(&self, model: Option<&str>) -> Result<(), Failure> {
        let models = &self.spec.models;
        if models.is_empty() || model.is_some_and(|model| models.iter().any(|m| m == model)) {
            return Ok(());
        }
        let what = match model {
            Some(_) => "this key may not use this model",
            None => "this key is bound to certain models: name one of them in `model`",
        };
        Err(forbidden(what).at("model"))
    }

    /// The class of a request under this key that wishes for `wish`.
    pub fn class(&self, wish: Option<Class>) -> Class {
        match (self.spec.class, wish) {
            (Some(ceiling), Some(wish)) => wish.min(ceiling),
            (Some(class), None) => class,
            (None, wish) => wish.unwrap_or_default(),
        }
    }

    /// Whether its holder may see that this model exists.
    pub fn sees(&self, model: &str) -> bool {
        self.spec.models.is_empty() || self.spec.models.iter().any(|m| m == model)
    }
}

/// 429, with the whole seconds after which a retry makes sense.
pub fn limited(code: &'static str, what: String, wait: Duration) -> Failure {
    let mut failure = Failure::new(429, code, Blame::Client, what);
    failure.retry_after_secs = Some(wait.as_secs_f64().ceil().clamp(1.0, 3600.0) as u32);
    failure
}

/// One request under a key.
#[derive(Debug)]
pub struct KeyPermit(Arc<Key>);

impl Drop for KeyPermit {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Relaxed);
    }
}

/// A bucket that fills at a rate up to its burst; each request takes one token.
#[derive(Debug)]
pub struct Bucket {
    rate: RateSpec,
    tokens: f64,
    at: Instant,
}

impl Bucket {
    pub fn new(rate: RateSpec, now: Instant) -> Self {
        Bucket { rate, tokens: rate.burst, at: now }
    }

    /// Takes a token, or says how long until there is one.
    pub fn take(&mut self, now: Instant) -> Result<(), Duration> {
        let passed = now.saturating_duration_since(self.at).as_secs_f64();
        self.at = self.at.max(now);
        self.tokens = (self.tokens + passed * self.rate.per_second).min(self.rate.burst);
        if self.tokens >= 1.0 {
            self.tokens -= 1.0;
            return Ok(());
        }
        Err(Duration::from_secs_f64(((1.0 - self.tokens) / self.rate.per_second).min(3600.0)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(name: &str, key: &str) -> KeySpec {
        KeySpec { name: name.into(), sha256: Sha256::digest(key).into(), ..KeySpec::default() }
    }

    fn ring(specs: Vec<KeySpec>) -> Keyring {
        Keyring::new(&specs, &Keyring::default(), Instant::now())
    }

    fn headers(name: &'static str, value: &str) -> HeaderMap {
        [(http::HeaderName::from_static(name), value.parse().unwrap())].into_iter().collect()
    }

    #[test]
    fn rights_are_told_apart() {
        let admin = KeySpec { admin: true, data: false, ..spec("ops", "s3") };
        let ring = ring(vec![spec("a", "s1"), spec("b", "s2"), admin]);
        let ask = |given: &str, right| {
            let found = ring.authorize(&headers("authorization", given), right);
            found.map(|key| key.map(|k| k.name().to_owned())).map_err(|f| f.status)
        };
        assert_eq!(ask("Bearer s2", Right::Data), Ok(Some("b".into())));
        assert_eq!(ask("bearer s1", Right::Data), Ok(Some("a".into())));
        assert_eq!(ask("Bearer s1", Right::Admin), Err(403));
        assert_eq!(ask("Bearer s3", Right::Admin), Ok(Some("ops".into())));
        assert_eq!(ask("Bearer s3", Right::Data), Err(403));
        for bad in ["Bearer s", "s1", "Basic s1", "Bearer ", ""] {
            assert_eq!(ask(bad, Right::Data), Err(401), "{bad}");
        }
        assert_eq!(ask("", Right::Nobody), Ok(None));
        assert!(ring.authorize(&headers("x-api-key", "s1"), Right::Data).is_ok());
    }

    #[test]
    fn without_keys_all_is_open_and_an_admin_key_closes_only_that() {
        let (none, nobody) = (ring(vec![]), HeaderMap::new());
        assert!(none.authorize(&nobody, Right::Data).is_ok() && none.authorize(&nobody, Right::Admin).is_ok());
        let some = ring(vec![KeySpec { admin: true, data: false, ..spec("ops", "s") }]);
        assert!(some.authorize(&nobody, Right::Data).is_ok());
        assert_eq!(some.authorize(&nobody, Right::Admin).unwrap_err().status, 401);
    }

    #[test]
    fn a_rate_refills_and_says_when() {
        let start = Instant::now();
        let mut bucket = Bucket::new(RateSpec { per_second: 2.0, burst: 3.0 }, start);
        for _ in 0..3 {
            assert_eq!(bucket.take(start), Ok(()));
        }
        assert_eq!(bucket.take(start), Err(Duration::from_millis(500)));
        assert_eq!(bucket.take(start + Duration::from_millis(500)), Ok(()));
        assert!(bucket.take(start).is_err(), "time that stands back gives nothing");
        let later = start + Duration::from_secs(60);
        assert_eq!((0..9).filter(|_| bucket.take(later).is_ok()).count(), 3);
    }

    #[test]
    fn concurrency_counts_what_runs_and_outlives_a_reload() {
        let now = Instant::now();
        let limited = KeySpec { concurrent_max: Some(2), ..spec("a", "s") };
        let first = ring(vec![limited.clone()]);
        let permits = [(); 2].map(|()| first.keys[0].enter(now).unwrap());
        let refused = first.keys[0].enter(now).unwrap_err();
        assert_eq!((refused.status, refused.retry_after_secs), (429, Some(1)));
        let reloaded = Keyring::new(&[limited, spec("b", "t")], &first, now);
        assert!(reloaded.keys[0].enter(now).is_err(), "the same requests still run");
        drop(permits);
        assert!(reloaded.keys[0].enter(now).is_ok());
        assert_eq!(reloaded.keys[0].running.load(Relaxed), 0);
    }

    #[test]
    fn a_class_is_a_ceiling_and_a_default() {
        let of = |class, wish| Key::new(KeySpec { class, ..spec("a", "s") }, Instant::now()).class(wish);
        assert_eq!((of(None, None), of(None, Some(Class::High))), (Class::Normal, Class::High));
        assert_eq!((of(Some(Class::High), None), of(Some(Class::Low), Some(Class::High))), (Class::High, Class::Low));
        assert_eq!(of(Some(Class::High), Some(Class::Low)), Class::Low);
    }

    #[test]
    fn models() {
        let bound = Key::new(KeySpec { models: vec!["m".into()], ..spec("a", "s") }, Instant::now());
        assert!(bound.allows(Some("m")).is_ok());
        assert_eq!(bound.allows(Some("x")).unwrap_err().status, 403);
        assert_eq!(bound.allows(None).unwrap_err().status, 403);
        assert!(Key::new(spec("a", "s"), Instant::now()).allows(None).is_ok());
    }
}
