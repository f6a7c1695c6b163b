//! Faults as they strike: each kind, done to an exchange, its workers or their channel.

use std::collections::{BTreeMap, BTreeSet};

use tandem_handoff::{ids::Channel, state::AttemptState};

use super::{Event, World};
use crate::{
    fabric::{Harm, lock},
    faults::{Fault, Place, Spot, Stage},
    gateway::Travel,
    node::{LegEnd, Side},
    wire::Wire,
};

impl World {
    /// A fault strikes an exchange: the one that it was aimed at, or any.
    pub(super) fn strike(&mut self, fault: Fault, aimed: Option<usize>) {
        let live = self.gateway.live();
        let Some(exchange) =
            aimed.or_else(|| (!live.is_empty()).then(|| live[lock(&self.wire).ground.rng.index(live.len())]))
        else {
            return;
        };
        self.say(&format!("FAULT: {} (exchange {exchange})", fault.name()));
        let mut places = self.places(exchange);
        if matches!(fault, Fault::ChannelCut | Fault::ChannelStalls | Fault::DataBreaks | Fault::DataSlow) {
            // An attempt in quarantine has lost its channel: what is harmed is a later session of the pair.
            let quarantined =
                |place: &Place| matches!(place, Place::Attempt(spot) if spot.state == AttemptState::Quarantined);
            places.retain(|place| !quarantined(place));
        }
        if self.inflict(fault, exchange) {
            places.into_iter().for_each(|place| self.coverage.count(place, fault));
        }
    }

    /// Does it. True when it took effect then and there: a fault that is only armed is counted when it comes true
    /// ([`Self::count_hits`], [`Self::count_failed_step`]), and one that found nothing to harm is not counted.
    fn inflict(&mut self, fault: Fault, exchange: usize) -> bool {
        let [prefill, decode] = [0, 1].map(|side: usize| self.gateway.exchanges[exchange].legs[side].node);
        match fault {
            Fault::ClientLeaves => {
                let was_live = !self.gateway.exchanges[exchange].over;
                let acts = self.gateway.client_left(self.gateway.exchanges[exchange].client);
                self.act(acts);
                was_live && self.gateway.exchanges[exchange].over
            }
            Fault::DeadlinePasses => {
                let was_live = !self.gateway.exchanges[exchange].over;
                let acts = self.gateway.timed_out(exchange);
                self.act(acts);
                was_live
            }
            Fault::PrefillStepFails => self.fail_step(prefill),
            Fault::DecodeStepFails => self.fail_step(decode),
            Fault::PrefillAborts => self.abort(exchange, prefill),
            Fault::DecodeAborts => self.abort(exchange, decode),
            Fault::PrefillCrashes => self.crash(prefill),
            Fault::DecodeCrashes => self.crash(decode),
            Fault::PrefillPauses => self.pause(prefill),
            Fault::DecodePauses => self.pause(decode),
            Fault::PrefillStops => self.stop(prefill),
            Fault::DecodeStops => self.stop(decode),
            Fault::RoomDoubled => {
                self.double(exchange);
                true
            }
            Fault::ChannelCut
            | Fault::ChannelStalls
            | Fault::DataBreaks
            | Fault::DataSlow
            | Fault::AckLost
            | Fault::BytesChange
            | Fault::FenceFails => self.harm_channel(fault, prefill, decode),
        }
    }

    fn harm_channel(&mut self, fault: Fault, prefill: usize, decode: usize) -> bool {
        let (Some(p), Some(d)) = (self.nodes[prefill].incarnation(), self.nodes[decode].incarnation()) else {
            return false;
        };
        let Wire { ground, fabric, network } = &mut *lock(&self.wire);
        let between = |channel: &Channel| channel.prefill == p && channel.decode == d;
        let Some(channel) = network.channels().into_iter().find(between) else { return false };
        match fault {
            Fault::ChannelCut => {
                network.cut(ground, channel);
                true
            }
            Fault::ChannelStalls => {
                let micros = ground.rng.range(2000, 90_000);
                network.stall(ground, channel, micros);
                true
            }
            Fault::DataBreaks => fabric.harm(ground, Harm::Break(channel)),
            Fault::DataSlow => {
                let until = ground.now + ground.rng.range(10_000, 150_000);
                ground.slow_down(channel, until);
                true
            }
            Fault::BytesChange => {
                ground.flip_next(channel);
                false
            }
            Fault::AckLost => {
                fabric.harm(ground, Harm::LoseAck(channel));
                false
            }
            Fault::FenceFails => {
                for _ in 0..ground.rng.range(1, 2) {
                    fabric.harm(ground, Harm::FailFence(channel));
                }
                network.cut(ground, channel);
                false
            }
            _ => false,
        }
    }

    /// Where an exchange is, on both sides, as far as the workers know it.
    fn places(&self, exchange: usize) -> Vec<Place> {
        let open = &self.gateway.exchanges[exchange];
        let samples = self.gateway.samples.iter().filter(|(_, of)| **of == exchange);
        let mut places: Vec<Place> = samples
            .filter_map(|(&(node, sample), _)| {
                let side = self.nodes[node].setup.side;
                let attempt = self.nodes[node].state(sample).map(|state| Place::Attempt(Spot { side, state }));
                attempt.or_else(|| self.nodes[node].stage(sample).map(Place::Request))
            })
            .collect();
        let at_prefill = places.iter().any(|place| place.side() == Side::Prefill);
        if !at_prefill && !open.over && open.legs[0].travel == Travel::Over {
            places.push(Place::Request(Stage::Delivered));
        }
        places
    }

    /// Armed faults of the data path that came true, each of an attempt.
    pub(super) fn count_hits(&mut self) {
        let hits = std::mem::take(&mut lock(&self.wire).ground.hits);
        for (fault, attempt, request) in hits {
            let node = self.nodes.iter().position(|node| node.incarnation() == Some(attempt.decode));
            let exchange = node.and_then(|node| self.gateway.samples.get(&(node, request)).copied());
            if let Some(exchange) = exchange {
                let places = self.places(exchange);
                places.into_iter().for_each(|place| self.coverage.count(place, fault));
            }
        }
    }

    /// Where the exchanges of a worker are whose device is going to fail a step; empty when it is not.
    pub(super) fn before_step(&self, node: usize) -> BTreeMap<usize, Vec<Place>> {
        if self.nodes[node].fail_steps() == 0 {
            return BTreeMap::new();
        }
        let samples = self.gateway.samples.range((node, 0)..=(node, u64::MAX));
        let exchanges: BTreeSet<usize> = samples.map(|(_, &exchange)| exchange).collect();
        exchanges.into_iter().map(|exchange| (exchange, self.places(exchange))).collect()
    }

    /// A step failed and its samples with it. What was still an attempt's at D before this turn was committed in it, and
    /// what waited at P was reserved in it: only such samples are in a step.
    pub(super) fn count_failed_step(
        &mut self,
        node: usize,
        before: &BTreeMap<usize, Vec<Place>>,
        ended: &[(u64, LegEnd)],
    ) {
        let here = self.nodes[node].setup.side;
        let fault = if here == Side::Prefill { Fault::PrefillStepFails } else { Fault::DecodeStepFails };
        for (sample, end) in ended {
            let failed =
                matches!(end, LegEnd::Failed { message, .. } if message.starts_with("a step of the model failed"));
            let exchange = self.gateway.samples.get(&(node, *sample));
            let Some(places) = exchange.filter(|_| failed).and_then(|exchange| before.get(exchange)) else { continue };
            for &place in places {
                let struck = match place {
                    Place::Attempt(Spot { side: Side::Decode, .. }) if here == Side::Decode => {
                        Place::Request(Stage::Committed)
                    }
                    Place::Attempt(Spot { side: Side::Prefill, state: AttemptState::Waiting })
                        if here == Side::Prefill =>
                    {
                        Place::Attempt(Spot { side: Side::Prefill, state: AttemptState::Open })
                    }
                    Place::Request(Stage::Preempted) if here == Side::Decode => Place::Request(Stage::Decoding),
                    other => other,
                };
                self.coverage.count(struck, fault);
            }
        }
    }

    fn fail_step(&mut self, node: usize) -> bool {
        if let Some(incarnation) = self.nodes[node].incarnation()
            && let Some(host) = lock(&self.wire).ground.hosts.get_mut(&incarnation)
        {
            host.fail_steps += 1;
        }
        false
    }

    fn abort(&mut self, exchange: usize, node: usize) -> bool {
        let running = |(&(at, sample), of): (&(usize, u64), &usize)| {
            *of == exchange && at == node && self.nodes[node].serves(sample)
        };
        let finds = self.gateway.samples.iter().any(running);
        self.nodes[node].abort(format!("x{exchange}"));
        self.schedule_turn(node, self.now + 1);
        finds
    }

    pub(super) fn crash(&mut self, node: usize) -> bool {
        let was_alive = self.nodes[node].is_alive();
        for sample in self.nodes[node].crash() {
            if let Some(&exchange) = self.gateway.samples.get(&(node, sample)) {
                let side = self.nodes[node].setup.side;
                self.leg_lost(exchange, side);
            }
        }
        let back = self.now + self.draw(500, 80_000);
        self.agenda.at(back, Event::Start(node));
        was_alive
    }

    fn stop(&mut self, node: usize) -> bool {
        if self.nodes[node].paused {
            return false;
        }
        let was_alive = self.nodes[node].is_alive();
        let now = self.now;
        for (sample, end) in self.nodes[node].shut_down(now) {
            self.sample_ended(node, sample, end);
        }
        let gone = self.now + self.draw(1, 300);
        self.agenda.at(gone, Event::Exit(node));
        was_alive
    }

    fn pause(&mut self, node: usize) -> bool {
        let Some(incarnation) = self.nodes[node].incarnation() else { return false };
        if self.nodes[node].paused {
            return false;
        }
        let micros = self.draw(500, 120_000);
        self.nodes[node].pause(true);
        let wire = &mut *lock(&self.wire);
        wire.network.paused(&mut wire.ground, incarnation, micros);
        self.agenda.at(self.now + micros, Event::Resume(node));
        true
    }

    /// Another client comes with the room of a live exchange, and another prompt.
    fn double(&mut self, exchange: usize) {
        let open = &self.gateway.exchanges[exchange];
        let prefill = open.legs[0].node;
        let is_open = matches!(open.legs[0].travel, Travel::Running(sample)
            if matches!(self.nodes[prefill].state(sample), Some(AttemptState::Open | AttemptState::Pushed)));
        let mut setup = self.gateway.clients[open.client].setup.clone();
        let other: Vec<u32> = setup.prompt.iter().map(|token| token % 23 + 1).collect();
        setup.prompt = other.into();
        setup.decode_prompt = None;
        setup.retries = 0;
        setup.arrives = self.now;
        self.gateway.exchanges[exchange].doubled_while_open = is_open;
        let client = self.add_client(setup);
        self.gateway.clients[client].doubles = Some(exchange);
    }
}
