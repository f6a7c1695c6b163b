//! What goes wrong between and in the workers of a split, on purpose: deaths, pauses, and a bad network.
//!
//! A strike begins, clears what the test had arranged in the proxy, lasts its time, and ends with every process running and
//! every line open again.

use std::fmt;
use std::future::Future;
use std::time::Duration;

use crate::fleet::{Fleet, Role};
use crate::proxy::{Line, Way};

/// Settings of workers under faults: a peer that is silent for 450 ms is lost.
pub const HEARTBEATS: &str = "--heartbeat-interval-ms 150 --heartbeat-max-failure 2";
/// A proxy sees what goes over sockets only.
pub const OVER_TCP: &str = "--disaggregation-transfer-backend tcp";
pub const OVER_SHM: &str = "--disaggregation-transfer-backend shm";
/// Shorter than the silence that loses a peer.
const PAUSE_SHORT: Duration = Duration::from_millis(60);
/// Longer.
const PAUSE_LONG: Duration = Duration::from_millis(700);
const CONTROL_DELAY: Duration = Duration::from_millis(25);
const DATA_DELAY: Duration = Duration::from_millis(3);

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Fault {
    /// `kill -9`; a new process takes the place on the same ports.
    KillPrefill,
    KillDecode,
    /// SIGSTOP, and SIGCONT before anybody counts the process as lost.
    PausePrefill,
    PauseDecode,
    /// SIGSTOP, and SIGCONT when its peer has given it up.
    StopPrefill,
    StopDecode,
    /// Connections end.
    CutControl,
    CutData,
    /// A connection lives, and nothing passes one way; control for longer than heartbeats allow, data until the client has
    /// its outcome.
    StallControlToPrefill,
    StallControlToDecode,
    StallData,
    /// Everything takes longer until the client has its outcome.
    DelayControl,
    DelayData,
    ClientLeaves,
}

pub use Fault::*;

impl Fault {
    pub const ALL: [Fault; 14] = [
        KillPrefill,
        KillDecode,
        PausePrefill,
        PauseDecode,
        StopPrefill,
        StopDecode,
        CutControl,
        CutData,
        StallControlToPrefill,
        StallControlToDecode,
        StallData,
        DelayControl,
        DelayData,
        ClientLeaves,
    ];

    /// Shorter than anybody's patience: the client must get its answer.
    pub fn is_harmless(self) -> bool {
        [PausePrefill, PauseDecode, DelayControl, DelayData].contains(&self)
    }

    /// Whether a proxy has to do it.
    pub fn is_of_network(self) -> bool {
        let network =
            [CutControl, CutData, StallControlToPrefill, StallControlToDecode, StallData, DelayControl, DelayData];
        network.contains(&self)
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            KillPrefill => "kill P",
            KillDecode => "kill D",
            PausePrefill => "pause P",
            PauseDecode => "pause D",
            StopPrefill => "stop P",
            StopDecode => "stop D",
            CutControl => "cut ctl",
            CutData => "cut data",
            StallControlToPrefill => "stall >P",
            StallControlToDecode => "stall >D",
            StallData => "stall data",
            DelayControl => "slow ctl",
            DelayData => "slow data",
            ClientLeaves => "client",
        })
    }
}

/// The workers of a fleet that a strike means, by their places.
#[derive(Clone, Copy, Debug)]
pub struct Aim {
    pub prefill: usize,
    pub decode: usize,
}

impl Aim {
    pub fn at(fleet: &Fleet, nth_prefill: usize, nth_decode: usize) -> Self {
        let of = |role, nth| fleet.place(role, nth);
        Self { prefill: of(Role::Prefill, nth_prefill), decode: of(Role::Decode, nth_decode) }
    }
}

/// Strikes, and repairs. `outcome` ends when the client that a fault may keep waiting has its outcome.
pub async fn strike(fleet: &mut Fleet, aim: Aim, fault: Fault, outcome: impl Future<Output = ()>) {
    match fault {
        KillPrefill => kill(fleet, aim.prefill, aim).await,
        KillDecode => kill(fleet, aim.decode, aim).await,
        PausePrefill => pause(fleet, aim.prefill, aim, PAUSE_SHORT).await,
        PauseDecode => pause(fleet, aim.decode, aim, PAUSE_SHORT).await,
        StopPrefill => pause(fleet, aim.prefill, aim, PAUSE_LONG).await,
        StopDecode => pause(fleet, aim.decode, aim, PAUSE_LONG).await,
        ClientLeaves => clear(fleet, aim),
        network => {
            let proxy = fleet.workers[aim.prefill].proxy();
            match network {
                CutControl => proxy.cut(Line::Control),
                CutData => proxy.cut(Line::Data),
                _ => {}
            }
            proxy.clear();
            match network {
                StallControlToPrefill => proxy.stall(Line::Control, Way::ToPrefill),
                StallControlToDecode => proxy.stall(Line::Control, Way::ToDecode),
                StallData => proxy.stall(Line::Data, Way::ToDecode),
                DelayControl => {
                    proxy.delay(Line::Control, Way::ToPrefill, CONTROL_DELAY);
                    proxy.delay(Line::Control, Way::ToDecode, CONTROL_DELAY);
                }
                DelayData => proxy.delay(Line::Data, Way::ToDecode, DATA_DELAY),
                _ => {}
            }
            match network {
                StallControlToPrefill | StallControlToDecode => tokio::time::sleep(PAUSE_LONG).await,
                StallData | DelayControl | DelayData => outcome.await,
                _ => {}
            }
            proxy.clear();
        }
    }
}

fn clear(fleet: &Fleet, aim: Aim) {
    if let Some(proxy) = &fleet.workers[aim.prefill].proxy {
        proxy.clear();
    }
}

async fn kill(fleet: &mut Fleet, place: usize, aim: Aim) {
    fleet.workers[place].kill();
    clear(fleet, aim);
    fleet.revive_at(place).await;
}

async fn pause(fleet: &Fleet, place: usize, aim: Aim, time: Duration) {
    fleet.workers[place].signal("STOP");
    clear(fleet, aim);
    tokio::time::sleep(time).await;
    fleet.workers[place].signal("CONT");
}
