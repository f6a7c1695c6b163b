//! Faults as they strike: each kind, done to an exchange, its workers or their channel.

use tandem_handoff::{ids::Channel, state::AttemptState};

use super::{Event, World};
use crate::{
    fabric::{Harm, lock},
    faults::{Fault, Spot},
    gateway::Travel,
    node::Side,
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
        self.count(fault, exchange);
        self.say(&format!("FAULT: {} (exchange {exchange})", fault.name()));
        let [prefill, decode] = [0, 1].map(|side: usize| self.gateway.exchanges[exchange].legs[side].node);
        match fault {
            Fault::ClientLeaves => {
                let acts = self.gateway.client_left(self.gateway.exchanges[exchange].client);
                self.act(acts);
            }
            Fault::DeadlinePasses => {
                let acts = self.gateway.timed_out(exchange);
                self.act(acts);
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
            Fault::RoomDoubled => self.double(exchange),
            Fault::ChannelCut
            | Fault::ChannelStalls
            | Fault::DataBreaks
            | Fault::DataSlow
            | Fault::AckLost
            | Fault::BytesChange
            | Fault::FenceFails => self.harm_channel(fault, prefill, decode),
        }
    }

    fn harm_channel(&mut self, fault: Fault, prefill: usize, decode: usize) {
        let (Some(p), Some(d)) = (self.nodes[prefill].incarnation(), self.nodes[decode].incarnation()) else { return };
        let Wire { ground, fabric, network } = &mut *lock(&self.wire);
        let between = |channel: &Channel| channel.prefill == p && channel.decode == d;
        let Some(channel) = network.channels().into_iter().find(between) else { return };
        match fault {
            Fault::ChannelCut => network.cut(ground, channel),
            Fault::ChannelStalls => {
                let micros = ground.rng.range(2000, 90_000);
                network.stall(ground, channel, micros);
            }
            Fault::DataBreaks => fabric.harm(ground, Harm::Break(channel)),
            Fault::DataSlow => {
                let until = ground.now + ground.rng.range(10_000, 150_000);
                ground.slow_down(channel, until);
            }
            Fault::BytesChange => ground.flip_next(channel),
            Fault::AckLost => fabric.harm(ground, Harm::LoseAck(channel)),
            Fault::FenceFails => {
                for _ in 0..ground.rng.range(1, 2) {
                    fabric.harm(ground, Harm::FailFence(channel));
                }
                network.cut(ground, channel);
            }
            _ => {}
        }
    }

    fn count(&mut self, fault: Fault, exchange: usize) {
        for side in [Side::Prefill, Side::Decode] {
            let leg = &self.gateway.exchanges[exchange].legs[side as usize];
            let samples = self.gateway.samples.iter().filter(|(_, of)| **of == exchange);
            for (&(node, sample), _) in samples {
                if node == leg.node
                    && let Some(state) = self.nodes[node].state(sample)
                {
                    self.coverage.count(Spot { side, state }, fault);
                }
            }
        }
    }

    fn fail_step(&mut self, node: usize) {
        if let Some(incarnation) = self.nodes[node].incarnation()
            && let Some(host) = lock(&self.wire).ground.hosts.get_mut(&incarnation)
        {
            host.fail_steps += 1;
        }
    }

    fn abort(&mut self, exchange: usize, node: usize) {
        self.nodes[node].abort(format!("x{exchange}"));
        self.schedule_turn(node, self.now + 1);
    }

    pub(super) fn crash(&mut self, node: usize) {
        for sample in self.nodes[node].crash() {
            if let Some(&exchange) = self.gateway.samples.get(&(node, sample)) {
                let side = self.nodes[node].setup.side;
                self.leg_lost(exchange, side);
            }
        }
        let back = self.now + self.draw(500, 80_000);
        self.agenda.at(back, Event::Start(node));
    }

    fn stop(&mut self, node: usize) {
        if self.nodes[node].paused {
            return;
        }
        let now = self.now;
        for (sample, end) in self.nodes[node].shut_down(now) {
            self.sample_ended(node, sample, end);
        }
        let gone = self.now + self.draw(1, 300);
        self.agenda.at(gone, Event::Exit(node));
    }

    fn pause(&mut self, node: usize) {
        let Some(incarnation) = self.nodes[node].incarnation() else { return };
        if self.nodes[node].paused {
            return;
        }
        let micros = self.draw(500, 120_000);
        self.nodes[node].pause(true);
        let wire = &mut *lock(&self.wire);
        wire.network.paused(&mut wire.ground, incarnation, micros);
        self.agenda.at(self.now + micros, Event::Resume(node));
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
