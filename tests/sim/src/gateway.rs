//! The gateway's part: clients, pairs, rooms, two legs per exchange, one outcome per client. *Pure*: decides, the world
//! acts.
//!
//! A leg that fails ends the other; a failed exchange is tried again as a new exchange in a new room (H8).

use std::{collections::BTreeMap, sync::Arc};

use tandem_handoff::{ids::Room, ticket::Ticket};
use tandem_worker::request::{LogprobRequest, SampleRequest, SamplingParams};

use crate::{
    model,
    node::{LegEnd, Side},
    rng::Rng,
};

/// What one client wants.
#[derive(Clone, Debug)]
pub struct ClientSetup {
    pub arrives: u64,
    pub prompt: Arc<[u32]>,
    pub sampling: SamplingParams,
    /// The decode worker's tokenizer gives this instead.
    pub decode_prompt: Option<Arc<[u32]>>,
    pub retries: u32,
}

/// What the client got.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    Answer(Vec<u32>),
    Failed { refused: bool, message: String },
    Aborted,
}

pub struct Client {
    pub setup: ClientSetup,
    pub outcome: Option<Outcome>,
    pub exchange: Option<usize>,
    tries: u32,
    /// Uses the room of this exchange, which is live: a client that chooses its own rooms.
    pub doubles: Option<usize>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Travel {
    /// On its way to the worker.
    Sent,
    /// The worker has it, under this number.
    Running(u64),
    Over,
}

pub struct Leg {
    pub node: usize,
    pub travel: Travel,
    /// The gateway closed it.
    pub cut: bool,
}

/// One attempt to answer one client.
pub struct Exchange {
    pub client: usize,
    pub room: Room,
    pub legs: [Leg; 2],
    pub over: bool,
    /// Another client used the room while the attempt was open at P: that may do this one no harm.
    pub doubled_while_open: bool,
    alias: bool,
}

/// What the world has to do for the gateway.
#[derive(Clone, Debug, PartialEq)]
pub enum Act {
    /// Carry both legs of the exchange to their workers.
    Start(usize),
    /// Close a leg's connection.
    Cut(usize, Side),
    /// Try the client again later.
    Retry(usize),
    Violation(&'static str, String),
}

#[derive(Default)]
pub struct Gateway {
    pub clients: Vec<Client>,
    pub exchanges: Vec<Exchange>,
    /// Which exchange a sample of a worker serves.
    pub samples: BTreeMap<(usize, u64), usize>,
}

impl Gateway {
    pub fn add(&mut self, setup: ClientSetup) -> usize {
        self.clients.push(Client { setup, outcome: None, exchange: None, tries: 0, doubles: None });
        self.clients.len() - 1
    }

    /// Opens an exchange between these workers.
    pub fn open(&mut self, client: usize, prefill: usize, decode: usize, rng: &mut Rng) -> Vec<Act> {
        if self.clients[client].outcome.is_some() {
            return vec![];
        }
        let doubled = self.clients[client].doubles.map(|exchange| self.exchanges[exchange].room);
        let room = doubled.unwrap_or_else(|| Room::new(rng.word() >> 1).expect("63 bits"));
        let leg = |node| Leg { node, travel: Travel::Sent, cut: false };
        let legs = [leg(prefill), leg(decode)];
        let alias = rng.percent(10);
        self.exchanges.push(Exchange { client, room, legs, over: false, doubled_while_open: false, alias });
        let number = self.exchanges.len() - 1;
        self.clients[client].exchange = Some(number);
        self.clients[client].tries += 1;
        vec![Act::Start(number)]
    }

    /// What a leg carries to its worker.
    pub fn request(&self, exchange: usize, side: Side, prefill_name: &str) -> SampleRequest {
        let Exchange { client, room, alias, .. } = &self.exchanges[exchange];
        let setup = &self.clients[*client].setup;
        let other = setup.decode_prompt.as_ref().filter(|_| side == Side::Decode);
        let suffix = if *alias { ".alias" } else { "" };
        SampleRequest {
            rid: format!("x{exchange}"),
            sample_index: 0,
            prompt: other.unwrap_or(&setup.prompt).clone(),
            sampling: setup.sampling.clone(),
            logprobs: LogprobRequest::default(),
            ticket: Some(Ticket { host: format!("{prefill_name}{suffix}"), port: 8998, room: *room }),
        }
    }

    /// A leg ended at its worker, or was lost with it.
    pub fn leg_ended(&mut self, exchange: usize, side: Side, end: LegEnd, room_tokens: usize) -> Vec<Act> {
        let open = &mut self.exchanges[exchange];
        open.legs[side as usize].travel = Travel::Over;
        if open.over {
            return vec![];
        }
        let client = open.client;
        match (side, end) {
            (Side::Prefill, LegEnd::Finished(tokens)) => self.first_token(client, &tokens, room_tokens),
            (Side::Decode, LegEnd::Finished(tokens)) => self.answered(exchange, tokens, room_tokens),
            (_, LegEnd::Failed { refused, message }) => self.failed(exchange, refused, message),
            (_, LegEnd::Lost) => self.failed(exchange, false, "the worker was lost".into()),
        }
    }

    fn first_token(&mut self, client: usize, tokens: &[u32], room_tokens: usize) -> Vec<Act> {
        let setup = &self.clients[client].setup;
        let expected = model::answer(&setup.prompt, &setup.sampling, room_tokens.max(1));
        if setup.sampling.max_tokens > 0 && tokens != &expected[..1] {
            let what =
                format!("client {client}: P says {tokens:?} as its first token, the oracle {:?}", &expected[..1]);
            return vec![Act::Violation("H9", what)];
        }
        vec![]
    }

    fn answered(&mut self, exchange: usize, tokens: Vec<u32>, room_tokens: usize) -> Vec<Act> {
        let client = self.exchanges[exchange].client;
        self.exchanges[exchange].over = true;
        let setup = &self.clients[client].setup;
        let expected = model::answer(&setup.prompt, &setup.sampling, room_tokens);
        let mut acts = Vec::new();
        if setup.decode_prompt.is_some() {
            let what = format!("client {client} gets an answer although P and D have different prompts");
            acts.push(Act::Violation("H9", what));
        } else if tokens != expected {
            let what = format!("client {client} gets {tokens:?}, the oracle says {expected:?}");
            acts.push(Act::Violation("H9", what));
        }
        self.settle(client, Outcome::Answer(tokens), &mut acts);
        acts
    }

    fn failed(&mut self, exchange: usize, refused: bool, message: String) -> Vec<Act> {
        let mut acts = self.end(exchange);
        let Exchange { client, doubled_while_open, room, .. } = self.exchanges[exchange];
        let alone = self.exchanges.iter().filter(|other| other.room == room).count() == 1;
        if alone && message.contains("is in use by another") {
            let what = format!("exchange {exchange} has its room alone and is refused for it: {message}");
            acts.push(Act::Violation("H3", what));
        }
        if doubled_while_open && (message.contains("is in use by another") || message.contains("prompts differ")) {
            let what = format!("exchange {exchange} had its room first and is refused for it: {message}");
            acts.push(Act::Violation("H7", what));
        }
        let tries = self.clients[client].tries;
        if !refused && tries <= self.clients[client].setup.retries && self.clients[client].outcome.is_none() {
            acts.push(Act::Retry(client));
        } else {
            self.settle(client, Outcome::Failed { refused, message }, &mut acts);
        }
        acts
    }

    /// The exchange took longer than all deadlines of the handoff together.
    pub fn never_ended(&mut self, exchange: usize) -> Vec<Act> {
        if self.exchanges[exchange].over {
            return vec![];
        }
        let legs: Vec<Travel> = self.exchanges[exchange].legs.iter().map(|leg| leg.travel).collect();
        vec![Act::Violation("H6", format!("no deadline ended exchange {exchange}, its legs are {legs:?}"))]
    }

    /// The exchange took too long.
    pub fn timed_out(&mut self, exchange: usize) -> Vec<Act> {
        if self.exchanges[exchange].over {
            return vec![];
        }
        self.failed(exchange, false, "the gateway's deadline passed".into())
    }

    pub fn client_left(&mut self, client: usize) -> Vec<Act> {
        let mut acts = Vec::new();
        if self.clients[client].outcome.is_none() {
            if let Some(exchange) = self.clients[client].exchange {
                acts = self.end(exchange);
            }
            self.settle(client, Outcome::Aborted, &mut acts);
        }
        acts
    }

    /// Ends an exchange: both legs are closed.
    fn end(&mut self, exchange: usize) -> Vec<Act> {
        let open = &mut self.exchanges[exchange];
        if std::mem::replace(&mut open.over, true) {
            return vec![];
        }
        let mut acts = Vec::new();
        for side in [Side::Prefill, Side::Decode] {
            let leg = &mut open.legs[side as usize];
            if leg.travel != Travel::Over && !std::mem::replace(&mut leg.cut, true) {
                acts.push(Act::Cut(exchange, side));
            }
        }
        acts
    }

    /// H7: one outcome per client.
    fn settle(&mut self, client: usize, outcome: Outcome, acts: &mut Vec<Act>) {
        match &self.clients[client].outcome {
            None => self.clients[client].outcome = Some(outcome),
            Some(first) => {
                acts.push(Act::Violation("H7", format!("client {client} got {first:?}, and now {outcome:?}")))
            }
        }
    }

    /// Exchanges that are under way, in order.
    pub fn live(&self) -> Vec<usize> {
        (0..self.exchanges.len()).filter(|&exchange| !self.exchanges[exchange].over).collect()
    }

    pub fn all_settled(&self) -> bool {
        self.clients.iter().all(|client| client.outcome.is_some())
    }
}
