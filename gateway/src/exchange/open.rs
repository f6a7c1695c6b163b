//! Choosing a pair and connecting to it. Nothing is sent to either worker before both connections stand, so a worker that
//! cannot be reached costs nobody anything, and another pair is tried at once. Where decode's body is made of prefill's
//! answer, decode is connected to when that is there; one that cannot be reached then costs another decode worker only.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;

use crate::backend::{Bodies, Order, Pairing};
use crate::config::Role;
use crate::error::{Blame, Failure, Side};
use crate::exchange::drive::Request;
use crate::exchange::retry::Tries;
use crate::exchange::ticket;
use crate::fleet::{NoWorker, Picked, Worker, role_of};
use crate::gateway::Gateway;
use crate::leg::http1::{Beside, request_head};
use crate::leg::{ConnectLimits, Leg, Line, Unreachable};
use crate::pair::{self, Ask, WorkerId};

/// The legs of one attempt, ready to be sent, with new rooms.
pub enum Legs {
    /// A plain worker's, or a decode worker's that does both phases.
    One(Leg),
    Both(Leg, Leg),
    /// Decode's is sent later, to this worker if it can be reached. `fresh`: on a new connection.
    PrefillFirst {
        prefill: Leg,
        decode: Picked,
        fresh: bool,
    },
}

impl Legs {
    /// Prefill's, and decode's or the plain one.
    pub fn workers(&self) -> [Option<Arc<Worker>>; 2] {
        match self {
            Legs::One(leg) => [None, Some(leg.worker().clone())],
            Legs::Both(prefill, decode) => [Some(prefill.worker().clone()), Some(decode.worker().clone())],
            Legs::PrefillFirst { prefill, decode, .. } => [Some(prefill.worker().clone()), Some(decode.worker.clone())],
        }
    }
}

/// Opens legs for requests.
pub struct Opener<'a> {
    gateway: &'a Gateway,
    request: &'a Request,
    /// Workers that failed this request; used again where nobody else is left.
    failed: Vec<WorkerId>,
    unreachable: Vec<WorkerId>,
    why: Option<(Role, Side, Unreachable)>,
    /// The rendered prompt, once a policy asked for it.
    text: Option<String>,
}

impl<'a> Opener<'a> {
    pub fn new(gateway: &'a Gateway, request: &'a Request) -> Self {
        Opener { gateway, request, failed: vec![], unreachable: vec![], why: None, text: None }
    }

    /// The next try prefers others.
    pub fn avoid(&mut self, worker: Option<WorkerId>) {
        self.failed.extend(worker);
    }

    /// Picks pairs until the connections of one stand. `fresh`: none from the pool of idle ones.
    pub async fn open(&mut self, fresh: bool, tries: &mut Tries) -> Result<Legs, Failure> {
        let pool = &self.request.pool;
        loop {
            let order = self.request.backend().order(&self.request.scanned);
            let prefill = match order {
                Order::DecodeOnly => None,
                Order::Parallel | Order::PrefillFirst => Some(self.pick(Role::Prefill).await?),
            };
            let decode = self.pick(role_of(Side::Decode, pool.is_split())).await?;
            let wanted = (order != Order::PrefillFirst).then_some(&decode);
            match self.connect(prefill.as_ref(), wanted, fresh).await {
                Ok(lines) => return self.legs(prefill, decode, lines, fresh).await,
                Err((side, why)) => {
                    let picked = if side == Side::Prefill { prefill.as_ref().unwrap_or(&decode) } else { &decode };
                    self.note_unreachable(side, picked, why);
                    self.once_more(picked.worker.spec.role, tries)?;
                }
            }
        }
    }

    /// The decode leg of a request whose prefill leg ended, with a body that was made of its answer.
    pub async fn open_decode(mut self, mut decode: Picked, body: Bytes, fresh: bool) -> Result<Leg, Failure> {
        let mut tries = Tries::default();
        loop {
            match self.connect(None, Some(&decode), fresh).await {
                Ok((_, line)) => {
                    return Ok(self.leg(Side::Decode, decode, line.expect("one was asked for"), body, None));
                }
                Err((side, why)) => {
                    self.note_unreachable(side, &decode, why);
                    self.once_more(decode.worker.spec.role, &mut tries)?;
                    decode = self.pick(Role::Decode).await?;
                }
            }
        }
    }

    fn note_unreachable(&mut self, side: Side, picked: &Picked, why: Unreachable) {
        if why.timed_out {
            self.gateway.metrics.exchange.timed_out("connect");
        }
        self.unreachable.push(picked.worker.id());
        self.why = Some((picked.worker.spec.role, side, why));
    }

    fn once_more(&self, role: Role, tries: &mut Tries) -> Result<(), Failure> {
        if tries.further >= self.request.config.retries.max {
            return Err(self.nobody(self.request.pool.nobody(role)));
        }
        tries.further += 1;
        self.gateway.metrics.exchange.retried(self.request.endpoint);
        Ok(())
    }

    async fn connect(
        &self,
        prefill: Option<&Picked>,
        decode: Option<&Picked>,
        fresh: bool,
    ) -> Result<(Option<Line>, Option<Line>), (Side, Unreachable)> {
        let limits = ConnectLimits::of(&self.request.config.deadlines);
        let to = async |side, picked: Option<&Picked>| match picked {
            Some(picked) => {
                let opened = self.gateway.connector.open(&picked.worker, fresh, &limits).await;
                opened.map(Some).map_err(|why| (side, why))
            }
            None => Ok(None),
        };
        let (to_prefill, to_decode) = tokio::join!(to(Side::Prefill, prefill), to(Side::Decode, decode));
        Ok((to_prefill?, to_decode?))
    }

    /// A worker for one leg. Where none may serve, those of the role are asked once more before the client is turned away.
    async fn pick(&mut self, role: Role) -> Result<Picked, Failure> {
        let pool = &self.request.pool;
        let scanned = &self.request.scanned;
        if pool.policy(role).reads_text() && self.text.is_none() {
            self.text = Some(scanned.routing_text().into_owned());
        }
        let text = self.text.as_deref();
        let session = || pair::session_of(&self.request.headers);
        let (user, session) =
            if pool.policy(role).reads_key() { (scanned.session_user(), session()) } else { (None, None) };
        let key = session.or(user.as_deref());
        let ask = || Ask { text, prompt_bytes: scanned.body().len(), key, now: Instant::now() };
        let mut picked = match self.failed.is_empty() {
            true => pool.pick(role, &ask(), &self.unreachable),
            false => {
                let others = [&self.unreachable[..], &self.failed[..]].concat();
                pool.pick(role, &ask(), &others).or_else(|_| pool.pick(role, &ask(), &self.unreachable))
            }
        };
        if picked.is_err() && self.why.is_none() {
            Box::pin(self.gateway.prober.look_again(pool, role)).await;
            picked = pool.pick(role, &ask(), &self.unreachable);
        }
        picked.map_err(|nobody| self.nobody(nobody))
    }

    /// Why a side has no worker to offer: best, why the last one could not be reached.
    fn nobody(&self, nobody: NoWorker) -> Failure {
        match self.why.as_ref().filter(|(role, ..)| *role == nobody.role) {
            None => nobody.into(),
            Some((role, side, Unreachable { why, timed_out: true })) => {
                let name = role.name();
                let what = format!("no {name} worker could be connected to ({why}); retry in a few seconds");
                let failure = Failure::new(504, "connect_timeout", Blame::Worker(*side), what);
                Failure { retry_after_secs: Some(1), ..failure }.with_detail(nobody.detail)
            }
            Some((_, _, unreachable)) => NoWorker { why: unreachable.why.clone(), ..nobody }.into(),
        }
    }

    /// New rooms, the bodies, and the legs.
    async fn legs(
        &self,
        prefill: Option<Picked>,
        decode: Picked,
        (to_prefill, to_decode): (Option<Line>, Option<Line>),
        fresh: bool,
    ) -> Result<Legs, Failure> {
        let (request, backend) = (self.request, self.request.backend());
        let prefill_rank = prefill.as_ref().and_then(|picked| picked.rank);
        let rooms = ticket::mint_for(prefill_rank, request.scanned.samples, &mut rand::rng());
        let engine_id = match (&prefill, backend.needs_engine_id()) {
            (Some(picked), true) => self.gateway.engines.of(picked, request.config.deadlines.connect).await,
            _ => None,
        };
        let source = prefill.as_ref().map(|picked| picked.worker.clone());
        let pair = Pairing {
            bootstrap_host: source.as_ref().map_or("", |worker| worker.spec.host.as_str()),
            bootstrap_port: source.as_ref().and_then(|worker| worker.bootstrap_port()),
            prefill_rank,
            decode_rank: decode.rank,
            engine_id: engine_id.as_deref(),
            rooms: &rooms,
        };
        let bodies = backend.bodies(&request.scanned, &pair)?;
        let leg = |side, picked, line: Option<Line>, body: Option<Bytes>| {
            let (line, body) = (line.expect("it was connected to"), body.expect("the order has this leg"));
            self.leg(side, picked, line, body, Some(&pair))
        };
        let Bodies { prefill: to_p, decode: to_d } = bodies;
        Ok(match (prefill, to_decode) {
            (None, line) => Legs::One(leg(Side::Decode, decode, line, to_d)),
            (Some(prefill), None) => {
                Legs::PrefillFirst { prefill: leg(Side::Prefill, prefill, to_prefill, to_p), decode, fresh }
            }
            (Some(prefill), line) => {
                Legs::Both(leg(Side::Prefill, prefill, to_prefill, to_p), leg(Side::Decode, decode, line, to_d))
            }
        })
    }

    fn leg(&self, side: Side, picked: Picked, line: Line, body: Bytes, pair: Option<&Pairing>) -> Leg {
        let request = self.request;
        let alone = Pairing { decode_rank: picked.rank, ..Pairing::default() };
        let beside = Beside {
            api_key: picked.worker.spec.api_key.as_ref().map(|key| key.reveal()),
            header: request.backend().header(side, pair.unwrap_or(&alone)),
        };
        let path = request.endpoint.path();
        let head = request_head(path, &picked.worker.authority, &request.headers, &beside, body.len());
        Leg::new(side, picked, line, head, body)
    }
}
