//! Runs a target over its inputs and over mutants of them, and makes a finding small.

use std::{
    cell::Cell,
    collections::HashSet,
    fs::{self, File},
    hash::{DefaultHasher, Hash, Hasher},
    io,
    os::unix::fs::FileExt,
    panic::{AssertUnwindSafe, catch_unwind},
    path::PathBuf,
    sync::{Mutex, Once, PoisonError},
    time::{Duration, Instant},
};

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::{MEMORY, Target, corpus, mutate::mutate};

/// An input that takes longer is a finding.
const RUN_TIME_MAX: Duration = Duration::from_secs(5);
/// Inputs that are kept for mutation; beyond it a new one takes the place of another.
const KEPT_MAX: usize = 4096;
/// Runs that are spent on making a finding small.
const SHRINK_RUNS_MAX: u32 = 3000;

/// When to stop.
#[derive(Clone, Copy, Debug)]
pub enum Until {
    /// After so many mutants: the same work on every machine.
    Mutants(u64),
    Time(Duration),
}

/// A run without findings.
#[derive(Debug)]
pub struct Report {
    pub inputs: u64,
    /// Things that they came to and that differ from each other.
    pub ends: usize,
}

/// An input that breaks a promise.
#[derive(Debug)]
pub struct Finding {
    pub what: String,
    /// As small as it could be made.
    pub input: Vec<u8>,
}

impl Finding {
    /// Writes the input where the finder can take it from.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn save(&self, target: &dyn Target) -> io::Result<PathBuf> {
        let path = folder()?.join(format!("{}-{:016x}", target.name(), hash(&self.input)));
        fs::write(&path, &self.input)?;
        Ok(path)
    }
}

fn folder() -> io::Result<PathBuf> {
    let folder = std::env::temp_dir().join("tandem-fuzz");
    fs::create_dir_all(&folder)?;
    Ok(folder)
}

/// The input that runs now, in a file: what ends the whole process (an allocation that the system refuses, an overflow of
/// the stack) can still be told by it.
struct Running {
    path: PathBuf,
    file: File,
}

impl Running {
    fn new(target: &dyn Target) -> io::Result<Self> {
        let path = folder()?.join(format!("{}-running-{}", target.name(), std::process::id()));
        Ok(Self { file: File::create(&path)?, path })
    }

    fn note(&self, input: &[u8]) {
        let written = self.file.set_len(input.len() as u64).and_then(|()| self.file.write_all_at(input, 0));
        written.expect("the temporary folder takes an input");
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // A file that stays says no more than that this folder is not emptied.
        let _ = fs::remove_file(&self.path);
    }
}

/// Runs the target's seeds, its corpus, and then mutants of both.
///
/// # Errors
/// The first finding.
///
/// # Panics
/// When the temporary folder cannot be written.
pub fn fuzz(target: &dyn Target, seed: u64, until: Until) -> Result<Report, Finding> {
    // The allocator counts for the whole process.
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let start = Instant::now();
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut kept = target.seeds();
    kept.extend(corpus::saved(target.name()).into_iter().map(|saved| saved.bytes));
    let running = Running::new(target).expect("the temporary folder takes a file");
    let mut ends = HashSet::new();
    for input in &kept {
        running.note(input);
        ends.extend(tried(target, input)?);
    }
    let mut inputs = kept.len() as u64;
    let mutants_before = inputs;
    loop {
        let go_on = match until {
            Until::Mutants(most) => inputs - mutants_before < most,
            Until::Time(most) => start.elapsed() < most,
        };
        if !go_on {
            return Ok(Report { inputs, ends: ends.len() });
        }
        let mut input = kept[rng.random_range(0..kept.len())].clone();
        mutate(&mut rng, &mut input, &kept, target.words(), target.input_bytes_max());
        inputs += 1;
        running.note(&input);
        let ends_before = ends.len();
        ends.extend(tried(target, &input)?);
        if ends.len() > ends_before {
            match kept.len() < KEPT_MAX {
                true => kept.push(input),
                false => kept[rng.random_range(0..KEPT_MAX)] = input,
            }
        }
    }
}

/// One run; a finding comes back small.
fn tried(target: &dyn Target, input: &[u8]) -> Result<Vec<u64>, Finding> {
    checked(target, input).map_err(|what| {
        let input = shrunk(target, input.to_vec());
        Finding { what, input }
    })
}

/// One run: a hash of each thing that it came to, or what is wrong.
///
/// # Errors
/// The broken promise.
pub fn checked(target: &dyn Target, input: &[u8]) -> Result<Vec<u64>, String> {
    let start = Instant::now();
    MEMORY.reset_peak_usage();
    let before = MEMORY.current_usage();
    let end = quietly(|| catch_unwind(AssertUnwindSafe(|| target.run(input))));
    let memory = MEMORY.peak_usage().saturating_sub(before);
    let end = end.map_err(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        format!("it panics: {}", text.unwrap_or("without a text"))
    })?;
    let memory_max = target.memory_bytes_max(input.len());
    if memory > memory_max {
        return Err(format!("it takes {memory} bytes of memory for {} bytes; {memory_max} is the limit", input.len()));
    }
    if start.elapsed() > RUN_TIME_MAX {
        return Err(format!("it takes {} ms", start.elapsed().as_millis()));
    }
    let letters = |part: &str| part.bytes().filter(|byte| !byte.is_ascii_digit()).collect::<Vec<_>>();
    Ok(end.split(';').map(|part| hash(&letters(part))).collect())
}

/// Cuts pieces out, larger ones first, as long as what is left still fails.
fn shrunk(target: &dyn Target, mut input: Vec<u8>) -> Vec<u8> {
    let mut runs = 0;
    let mut piece = input.len().div_ceil(2);
    while piece > 0 {
        let mut at = 0;
        while at < input.len() && runs < SHRINK_RUNS_MAX {
            let mut less = input.clone();
            less.drain(at..(at + piece).min(input.len()));
            runs += 1;
            match checked(target, &less) {
                Err(_) => input = less,
                Ok(_) => at += piece,
            }
        }
        piece /= 2;
    }
    input
}

fn hash(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    bytes.hash(&mut hasher);
    hasher.finish()
}

thread_local! {
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

/// Runs without a panic's words on standard error: the finding tells them once.
fn quietly<T>(run: impl FnOnce() -> T) -> T {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if !QUIET.get() {
                before(info);
            }
        }));
    });
    QUIET.set(true);
    let out = run();
    QUIET.set(false);
    out
}
