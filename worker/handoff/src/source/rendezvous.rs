//! How a request and a Reserve find each other at P, in either order. *Pure.*

use super::{Notice, Peer, Request, RoomUse, Source, SourceEffect, SourceFact, State, Timer, Transfer};
use crate::{
    cause::{Cause, CauseKind, Side},
    ids::{Attempt, Channel, RequestId, Room, Time},
    sabotage::{Fault, Planted},
    wire::{CHECKSUMS_MAX, Frame, Reserve, prompt_hash},
};

impl Source {
    /// A Reserve came. Numbers grow on a channel, so an old or doubled one is dropped (H3).
    pub(super) fn reserved(&mut self, now: Time, channel: Channel, reserve: Reserve) {
        let Some(peer) = self.peers.get_mut(&channel) else {
            return;
        };
        if reserve.attempt.number <= peer.highest && !self.limits.planted.is(Fault::AcceptsOldNumbers) {
            return;
        }
        peer.highest = reserve.attempt.number;
        let room = reserve.room;
        match self.rooms.get(&room) {
            None => self.hold(now, reserve),
            Some(RoomUse::Tombstone(cause)) => {
                let cause = cause.clone();
                self.drop_room(room);
                self.refuse(reserve.attempt, cause);
            }
            Some(RoomUse::Request(id)) => {
                let id = *id;
                match self.requests.get(&id).map(|request| &request.state) {
                    Some(State::Waiting { .. }) => self.meet(now, id, reserve),
                    _ => self.refuse(reserve.attempt, in_use(room)),
                }
            }
            Some(RoomUse::Held(_)) => self.refuse(reserve.attempt, in_use(room)),
        }
    }

    fn hold(&mut self, now: Time, reserve: Reserve) {
        if self.held >= self.limits.held_reserves_max {
            let message = format!(
                "{} offers of pages wait for their requests, the limit of this prefill worker; a retry elsewhere is safe",
                self.held
            );
            self.refuse(reserve.attempt, Cause::new(Side::Prefill, CauseKind::Unavailable, message));
            return;
        }
        let room = reserve.room;
        self.held += 1;
        self.rooms.insert(room, RoomUse::Held(reserve));
        self.deadlines.set(Timer::Room(room), now.after_ms(self.limits.bootstrap_timeout_ms));
    }

    /// Request and Reserve of one room are both here: compares them, then opens the attempt or refuses both by name.
    pub(super) fn meet(&mut self, now: Time, id: RequestId, reserve: Reserve) {
        let attempt = reserve.attempt;
        let Some(Request { state: State::Waiting { prompt }, .. }) = self.requests.get(&id) else {
            return;
        };
        let pages = self.shape.pages_for(prompt.len());
        let peer_pages = self.peers.get(&attempt.channel()).map_or(0, |peer| peer.shape.pages);
        let (planted, mut pages) = (self.limits.planted, pages);
        let fits = if planted.is(Fault::TruncatesPages) {
            pages = pages.min(reserve.pages.len());
            Ok(())
        } else {
            compare(self.shape.page_size, prompt, pages, peer_pages, &reserve, planted)
        };
        if let Err(cause) = fits.and_then(|()| checksums_fit(&reserve, self.shape.kv_heads)) {
            self.refuse(attempt, cause.clone());
            self.forget_waiting(id, cause);
            return;
        }
        let (held_tokens, checksums) = (reserve.held_tokens, reserve.checksums);
        let transfer = Transfer {
            attempt,
            opened: now,
            first_post: None,
            pages,
            held: (held_tokens / self.shape.page_size) as usize,
            targets: reserve.pages,
            written: 0,
            outstanding: 0,
            poisoned: false,
            quarantined: false,
            account: Default::default(),
            checksums: checksums.then(Vec::new),
        };
        if let Some(request) = self.requests.get_mut(&id) {
            request.state = State::Open(transfer);
        }
        self.attempts.insert(attempt, id);
        self.deadlines.set(Timer::Request(id), now.after_ms(self.limits.waiting_timeout_ms));
        self.fact(SourceFact::Reserved { request: id, held_tokens, checksums });
    }

    /// D ended an attempt. It gets Drained, unless the outcome of one of the attempt's writes is unknown.
    pub(super) fn aborted(&mut self, now: Time, attempt: Attempt, room: Room, cause: Cause) {
        let early = match self.peers.get_mut(&attempt.channel()) {
            Some(peer) if attempt.number > peer.highest => {
                peer.highest = attempt.number;
                true
            }
            _ => false,
        };
        if let Some(&id) = self.attempts.get(&attempt) {
            self.end(now, id, cause, Notice::Drained);
            return;
        }
        let held = matches!(self.rooms.get(&room), Some(RoomUse::Held(reserve)) if reserve.attempt == attempt);
        if held {
            self.drop_room(room);
            self.bury(now, room, cause);
        } else if early {
            match self.rooms.get(&room) {
                Some(RoomUse::Request(id)) => {
                    let id = *id;
                    if matches!(self.requests.get(&id), Some(Request { state: State::Waiting { .. }, .. })) {
                        self.forget_waiting(id, cause);
                    }
                }
                Some(_) => {}
                None => self.bury(now, room, cause),
            }
        }
        let poisoned = |peer: &Peer| peer.poisoned.contains(&attempt.number);
        if !self.peers.get(&attempt.channel()).is_some_and(poisoned) {
            self.send_drained(attempt);
        }
    }

    /// A held Reserve, or a tombstone, has waited for its other half long enough.
    pub(super) fn room_expired(&mut self, room: Room) {
        if let Some(RoomUse::Held(reserve)) = self.drop_room(room) {
            let message = format!(
                "no request for bootstrap_room {room} reached the prefill worker within {} ms; a retry is safe",
                self.limits.bootstrap_timeout_ms
            );
            self.refuse(reserve.attempt, Cause::new(Side::Prefill, CauseKind::Timeout, message));
        }
    }

    /// Failed and Drained at once: nothing was posted for the attempt.
    fn refuse(&mut self, attempt: Attempt, cause: Cause) {
        let channel = attempt.channel();
        self.effects.push(SourceEffect::Send { channel, frame: Frame::Failed { attempt, cause } });
        self.send_drained(attempt);
    }

    /// Ends a waiting request that has met its other half, so that no tombstone is left.
    fn forget_waiting(&mut self, id: RequestId, cause: Cause) {
        if let Some(request) = self.requests.remove(&id) {
            self.deadlines.clear(Timer::Request(id));
            self.drop_room(request.room);
            self.fact(SourceFact::Failed { request: id, cause });
            self.fact(SourceFact::Quiet { request: id });
        }
    }

    /// Remembers the early end of a room for the half that has not come. At the limit nothing is remembered: that half
    /// then ends by its own deadline.
    pub(super) fn bury(&mut self, now: Time, room: Room, cause: Cause) {
        if self.tombstones < self.limits.tombstones_max && !self.limits.planted.is(Fault::IgnoresEarlyAbort) {
            self.tombstones += 1;
            self.rooms.insert(room, RoomUse::Tombstone(cause));
            self.deadlines.set(Timer::Room(room), now.after_ms(self.limits.bootstrap_timeout_ms));
        }
    }

    /// Frees a room, and keeps the counts of what rooms are used for.
    pub(super) fn drop_room(&mut self, room: Room) -> Option<RoomUse> {
        let room_use = self.rooms.remove(&room)?;
        self.deadlines.clear(Timer::Room(room));
        match room_use {
            RoomUse::Held(_) => self.held -= 1,
            RoomUse::Tombstone(_) => self.tombstones -= 1,
            RoomUse::Request(_) => {}
        }
        Some(room_use)
    }
}

fn in_use(room: Room) -> Cause {
    let message =
        format!("bootstrap_room {room} is in use by another live request; each request needs a room of its own");
    Cause::new(Side::Prefill, CauseKind::Refused, message)
}

/// The prompts, the held prefix and the pages of the two sides must fit each other before anything is computed.
fn compare(
    page_size: u32,
    prompt: &[u32],
    pages: usize,
    peer_pages: u32,
    reserve: &Reserve,
    planted: Planted,
) -> Result<(), Cause> {
    let refuse = |message: String| Err(Cause::new(Side::Prefill, CauseKind::Refused, message));
    if prompt.len() != reserve.prompt_tokens as usize {
        return refuse(format!(
            "the prompts differ: {} tokens on the prefill worker, {} on the decode worker; both must run the same \
             tokenizer and template",
            prompt.len(),
            reserve.prompt_tokens
        ));
    }
    if prompt_hash(prompt) != reserve.prompt_hash && !planted.is(Fault::SkipsPromptHash) {
        return refuse(format!(
            "the prompts differ: {} tokens on both workers, but not the same ones; both must run the same tokenizer and \
             template",
            prompt.len()
        ));
    }
    let unfit = |message: String| Err(Cause::new(Side::Prefill, CauseKind::Unfit, message));
    let held = reserve.held_tokens;
    if !held.is_multiple_of(page_size) || held as usize > prompt.len() {
        return unfit(format!("the decode worker holds {held} tokens, which is no whole-page prefix of the prompt"));
    }
    if prompt_hash(&prompt[..held as usize]) != reserve.held_hash {
        return unfit(format!("the {held} tokens that the decode worker holds are not the prompt's first ones"));
    }
    let needed = pages - (held / page_size) as usize;
    if reserve.pages.len() != needed {
        return unfit(format!("the decode worker offered {} pages, {needed} are needed", reserve.pages.len()));
    }
    if let Some(page) = reserve.pages.iter().find(|&&page| page >= peer_pages) {
        return unfit(format!("the decode worker offered page {page} of a pool of {peer_pages}"));
    }
    Ok(())
}

/// Done must be able to carry the checksums that the decode worker asks for.
fn checksums_fit(reserve: &Reserve, kv_heads: u32) -> Result<(), Cause> {
    let asked = if reserve.checksums { reserve.pages.len() * kv_heads as usize } else { 0 };
    if asked <= CHECKSUMS_MAX {
        return Ok(());
    }
    let message = format!(
        "the decode worker wants {asked} checksums, {CHECKSUMS_MAX} is the most; start it with a smaller context length or \
         without --enable-kv-checksum"
    );
    Err(Cause::new(Side::Prefill, CauseKind::Unfit, message))
}
