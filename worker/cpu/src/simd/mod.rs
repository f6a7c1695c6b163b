//! Everything that touches vector instructions or raw element pointers: instruction sets, packed weights, products,
//! row operations, attention. This folder, [`crate::kv`] and [`crate::threads`] hold the crate's unsafe code.
//!
//! A kernel is a struct of arguments with one body generic over [`Lanes`]; [`Isa::run`] compiles that body once per
//! instruction set and picks at run time. Kernel bodies are unsafe as a whole (each line would need its own block with
//! the same words), so their contract stands once, on [`Kernel::run`] and on the constructor of each kernel.
#![allow(unsafe_code, unsafe_op_in_unsafe_fn)]
// Register tiles are indexed side by side; iterators over one of them would hide the pairing.
#![allow(clippy::needless_range_loop)]

pub mod arena;
pub mod attention;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod lanes;
pub mod matmul;
pub mod panels;
mod portable;
pub mod rows;

use lanes::Lanes;
pub use lanes::{Element, LANES};

/// An instruction set that this machine has: the only way to get one is to ask the CPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Isa(Kind);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    Portable,
}

/// A kernel with its arguments.
trait Kernel {
    type Output;
    /// # Safety
    /// Only [`Isa::run`] calls this: the CPU has the instructions of `S`, and the code around is compiled with them.
    unsafe fn run<S: Lanes>(self) -> Self::Output;
}

impl Isa {
    /// All that this machine has, the best first.
    pub fn available() -> Vec<Isa> {
        let mut found = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            let vnni = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512vnni");
            let avx2 =
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
            if vnni && avx2 {
                found.push(Isa(Kind::Avx512));
            }
            if avx2 {
                found.push(Isa(Kind::Avx2));
            }
        }
        found.push(Isa(Kind::Portable));
        found
    }

    pub fn best() -> Isa {
        Self::available()[0]
    }

    /// Part of the numerics id.
    pub fn name(self) -> &'static str {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 => "avx512-vnni",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => "avx2-fma",
            Kind::Portable => "portable",
        }
    }

    #[inline]
    fn run<K: Kernel>(self, kernel: K) -> K::Output {
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
        unsafe fn avx512<K: Kernel>(kernel: K) -> K::Output {
            kernel.run::<avx512::Avx512>()
        }
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma,f16c")]
        unsafe fn avx2<K: Kernel>(kernel: K) -> K::Output {
            kernel.run::<avx2::Avx2>()
        }
        // SAFETY: an `Isa` exists only if the CPU reported the features that its function is compiled with.
        unsafe {
            match self.0 {
                #[cfg(target_arch = "x86_64")]
                Kind::Avx512 => avx512(kernel),
                #[cfg(target_arch = "x86_64")]
                Kind::Avx2 => avx2(kernel),
                Kind::Portable => kernel.run::<portable::Portable>(),
            }
        }
    }
}
