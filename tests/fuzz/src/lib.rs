//! Fuzz targets for everything that reads bytes of strangers, and for any order of calls of the handoff's two machines.
//!
//! A [`Target`] is a plain function of bytes that panics when a promise is broken, so that any fuzzer can drive it. Ours
//! ([`drive`]) mutates the targets' own seeds and the inputs of `corpus/`, and keeps an input that came to something new:
//! feedback without instrumentation, so that it runs on a stable compiler, and the same seed twice does the same twice. A
//! panic, memory out of proportion to the input, and an input that takes seconds are findings; a finding is made small
//! and saved, and belongs into `corpus/` once it is fixed.

pub mod corpus;
pub mod drive;
pub mod mutate;
pub mod targets;

/// Counts what a target allocates, in all threads of the process.
#[global_allocator]
static MEMORY: peak_alloc::PeakAlloc = peak_alloc::PeakAlloc;

/// Something that takes any bytes.
pub trait Target {
    /// Also the name of its folder in `corpus/`.
    fn name(&self) -> &'static str;

    /// Inputs that reach deep; mutation starts from them.
    fn seeds(&self) -> Vec<Vec<u8>>;

    /// Texts that mean something to the parser.
    fn words(&self) -> &'static [&'static str] {
        &[]
    }

    /// No mutant is longer.
    fn input_bytes_max(&self) -> usize {
        4096
    }

    /// Memory that one run may take for an input of so many bytes.
    fn memory_bytes_max(&self, input_bytes: usize) -> usize;

    /// Runs one input, and says what it came to: one thing, or several apart by semicolons. Digits do not count.
    ///
    /// # Panics
    /// When a promise is broken.
    fn run(&self, input: &[u8]) -> String;
}
