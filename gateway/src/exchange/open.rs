//! Choosing a pair and connecting to it. Nothing is sent to either worker before both connections stand, so a worker that
//! cannot be reached costs nobody anything, and another pair is tried at once.

use std::time::Instant;

use crate::config::Role;
use crate::error::{Blame, Failure, Side};
use crate::exchange::drive::Request;
use crate::exchange::machine;
use crate::exchange::retry::Tries;
use crate::exchange::ticket;
use crate::fleet::{NoWorker, Picked, role_of};
use crate::gateway::Gateway;
use crate::leg::http1::request_head;
use crate::leg::{ConnectLimits, Leg, Line, Unreachable};
use crate::pair::{Ask, WorkerId};

/// The legs of one attempt, ready to be sent, with new rooms.
pub struct Legs {
    pub order: machine::Legs,
    pub prefill: Option<Leg>,
    pub decode: Leg,
}

/// Opens legs for requests.
pub struct Opener<'a> {
    gateway: &'a Gateway,
    request: &'a Request,
    /// Workers that failed this request; used again where nobody else is left.
    failed: Vec<WorkerId>,
    unreachable: Vec<WorkerId>,
    why: Option<(Role, Side, Unreachable)>,
}

impl<'a> Opener<'a> {
    pub fn new(gateway: &'a Gateway, request: &'a Request) -> Self {
        Opener { gateway, request, failed: vec![], unreachable: vec![], why: None }
    }

    /// The next try prefers others.
    pub fn avoid(&mut self, worker: Option<WorkerId>) {
        self.failed.extend(worker);
    }

    /// Picks pairs until both connections of one stand. `fresh`: none from the pool of idle ones.
    pub async fn open(&mut self, fresh: bool, tries: &mut Tries) -> Result<Legs, Failure> {
        let pool = &self.request.pool;
        loop {
            let split = pool.is_split();
            let prefill = match split {
                true => Some(self.pick(Role::Prefill).await?),
                false => None,
            };
            let decode = self.pick(role_of(Side::Decode, split)).await?;
            let (side, why) = match self.connect(prefill.as_ref(), &decode, fresh).await {
                Ok((prefill_line, decode_line)) => {
                    return Ok(self.legs(prefill.zip(prefill_line), (decode, decode_line)));
                }
                Err(failed) => failed,
            };
            if why.timed_out {
                self.gateway.metrics.exchange.timed_out("connect");
            }
            let picked = if side == Side::Prefill { prefill.unwrap_or(decode) } else { decode };
            self.unreachable.push(picked.worker.id());
            let role = picked.worker.spec.role;
            self.why = Some((role, side, why));
            if tries.further >= self.request.config.retries.max {
                return Err(self.nobody(pool.nobody(role)));
            }
            tries.further += 1;
            self.gateway.metrics.exchange.retried(self.request.endpoint);
        }
    }

    async fn connect(
        &self,
        prefill: Option<&Picked>,
        decode: &Picked,
        fresh: bool,
    ) -> Result<(Option<Line>, Line), (Side, Unreachable)> {
        let deadlines = &self.request.config.deadlines;
        let limits = ConnectLimits { connect: deadlines.connect, idle: deadlines.pool_idle };
        let connector = &self.gateway.connector;
        let to_prefill = async {
            match prefill {
                Some(picked) => connector.open(&picked.worker, fresh, &limits).await.map(Some),
                None => Ok(None),
            }
        };
        let (to_prefill, to_decode) = tokio::join!(to_prefill, connector.open(&decode.worker, fresh, &limits));
        Ok((to_prefill.map_err(|why| (Side::Prefill, why))?, to_decode.map_err(|why| (Side::Decode, why))?))
    }

    /// A worker for one leg. Where none may serve, those of the role are asked once more before the client is turned away.
    async fn pick(&self, role: Role) -> Result<Picked, Failure> {
        let pool = &self.request.pool;
        let prompt_bytes = self.request.scanned.plain().len();
        let ask = || Ask { text: None, prompt_bytes, key: None, now: Instant::now() };
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

    /// New rooms, the bodies, and both legs.
    fn legs(&self, prefill: Option<(Picked, Line)>, decode: (Picked, Line)) -> Legs {
        let request = self.request;
        let body = match &prefill {
            None => request.scanned.plain(),
            Some((picked, _)) => {
                let samples = request.scanned.samples;
                let rooms = ticket::mint(samples, &mut rand::rng());
                let (host, port) = (&picked.worker.spec.host, picked.worker.bootstrap_port());
                request.scanned.splice(&ticket::fields(host, port, samples, &rooms))
            }
        };
        let leg = |side, (picked, line): (Picked, Line)| {
            let head = request_head(request.endpoint.path(), &picked.worker.authority, &request.headers, body.len());
            Leg::new(side, picked, line, head, body.clone())
        };
        let order = if prefill.is_some() { machine::Legs::Parallel } else { machine::Legs::One };
        Legs { order, prefill: prefill.map(|p| leg(Side::Prefill, p)), decode: leg(Side::Decode, decode) }
    }
}
