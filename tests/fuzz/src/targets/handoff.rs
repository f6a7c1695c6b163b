//! The handoff's two machines under any calls in any order, over a network that loses, doubles, delays and forges frames
//! and a fabric that keeps its contract. The input is the list of what happens, one byte per choice.
//!
//! Promised are H2 to H7: each request ends once on each side, each list of pages comes back once with its own proof and
//! never before quiet, a commit has all of its pieces and Done, P is quiet only when its writes have settled, and after
//! a cut and time nothing is left.

mod world;

use tandem_handoff::ids::RequestId;

use crate::Target;
use world::World;

/// Happenings in one input at most.
const STEPS_MAX: usize = 300;

/// Tries the machines over this fabric.
pub struct Handoff {
    /// A planted fault of the fabric: one piece is reported as settled twice.
    pub settles_twice: bool,
}

impl Handoff {
    pub fn real() -> Self {
        Self { settles_twice: false }
    }
}

/// What can happen next. The order is the encoding: a new one goes to the end, so that saved inputs keep their meaning.
#[derive(Clone, Copy, Debug)]
enum Step {
    Request,
    Reserve,
    Chunk,
    Finish,
    CancelPrefill,
    CancelDecode,
    ToPrefill,
    ToDecode,
    Land,
    Quiet,
    Verify,
    Wait,
    Connect,
    RefuseDial,
    CutPrefill,
    CutDecode,
    Unsettled,
    Reorder,
    Double,
    Lose,
    Forge,
    LandAgain,
    Restart,
}

const STEPS: [Step; 23] = [
    Step::Request,
    Step::Reserve,
    Step::Chunk,
    Step::Finish,
    Step::CancelPrefill,
    Step::CancelDecode,
    Step::ToPrefill,
    Step::ToDecode,
    Step::Land,
    Step::Quiet,
    Step::Verify,
    Step::Wait,
    Step::Connect,
    Step::RefuseDial,
    Step::CutPrefill,
    Step::CutDecode,
    Step::Unsettled,
    Step::Reorder,
    Step::Double,
    Step::Lose,
    Step::Forge,
    Step::LandAgain,
    Step::Restart,
];

/// The input, a byte at a time; zeros after its end.
pub struct Choices<'a>(&'a [u8]);

impl Choices<'_> {
    fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    /// One of `count`, or `None` of none.
    fn index(&mut self, count: usize) -> Option<usize> {
        let byte = usize::from(self.byte());
        (count > 0).then(|| byte % count)
    }

    fn id(&mut self) -> RequestId {
        RequestId(u64::from(self.byte() % 8))
    }
}

impl Target for Handoff {
    fn name(&self) -> &'static str {
        "handoff"
    }

    fn seeds(&self) -> Vec<Vec<u8>> {
        use Step::*;
        let code = |steps: &[(Step, &[u8])]| -> Vec<u8> {
            steps.iter().flat_map(|(step, choices)| [&[*step as u8], *choices].concat()).collect()
        };
        // With the checksums off and on: the first byte says.
        let open: [(Step, &[u8]); 5] =
            [(Request, &[0, 0]), (Reserve, &[0, 0, 0]), (Connect, &[]), (ToPrefill, &[]), (Chunk, &[0])];
        let good: [(Step, &[u8]); 7] = [
            (Finish, &[0]),
            (ToDecode, &[]),
            (Land, &[0]),
            (Land, &[0]),
            (Land, &[0]),
            (Land, &[0]),
            (Verify, &[0, 0]),
        ];
        let aborted: [(Step, &[u8]); 5] =
            [(CancelDecode, &[0]), (ToPrefill, &[]), (Land, &[0]), (Quiet, &[0]), (ToDecode, &[])];
        let twice: [(Step, &[u8]); 3] = [(Request, &[0, 0]), (Reserve, &[0, 1, 0]), (ToPrefill, &[])];
        let lost: [(Step, &[u8]); 4] = [(CutPrefill, &[]), (Unsettled, &[0, 1]), (CutDecode, &[]), (Quiet, &[0])];
        let lists: [&[(Step, &[u8])]; 4] = [&good, &aborted, &twice, &lost];
        let seed = |sums: u8, list: &[(Step, &[u8])]| [vec![sums], code(&open), code(list)].concat();
        (0..2).flat_map(|sums| lists.iter().map(move |list| seed(sums, list)).collect::<Vec<_>>()).collect()
    }

    fn input_bytes_max(&self) -> usize {
        3 * STEPS_MAX
    }

    fn memory_bytes_max(&self, input_bytes: usize) -> usize {
        (1 << 20) + 16_384 * input_bytes
    }

    fn run(&self, input: &[u8]) -> String {
        let mut choices = Choices(input);
        let mut world = World::new(choices.byte() % 2 == 1, self.settles_twice);
        for _ in 0..STEPS_MAX {
            if choices.0.is_empty() {
                break;
            }
            let step = STEPS[usize::from(choices.byte()) % STEPS.len()];
            world.step(step, &mut choices);
        }
        world.end();
        world.story()
    }
}
