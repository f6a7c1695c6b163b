//! What the machine offers beyond its CPU. *Today*: whether an NVIDIA driver is loaded, so that `--device` can say
//! plainly what it found. The CUDA kernels and their launchers belong here; there are none yet.

use std::path::Path;

/// Where the NVIDIA kernel module states its version.
const DRIVER_FILE: &str = "/proc/driver/nvidia/version";

/// The loaded NVIDIA kernel driver's version, such as `570.86.15`; `None` when no driver is loaded.
pub fn nvidia_driver_version() -> Option<String> {
    parse_driver_version(&std::fs::read_to_string(Path::new(DRIVER_FILE)).ok()?)
}

/// Pure. The first word that looks like a version in the line that begins with `NVRM version:`.
fn parse_driver_version(text: &str) -> Option<String> {
    let line = text.lines().find_map(|line| line.strip_prefix("NVRM version:"))?;
    line.split_whitespace().find(|word| is_version(word)).map(str::to_owned)
}

fn is_version(word: &str) -> bool {
    word.contains('.') && word.split('.').all(|part| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_both_spellings_of_the_driver() {
        let open =
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\nGCC version: 12.3.0";
        let closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19\n";
        assert_eq!(parse_driver_version(open).as_deref(), Some("570.86.15"));
        assert_eq!(parse_driver_version(closed).as_deref(), Some("535.104.05"));
    }

    #[test]
    fn an_unknown_text_is_no_driver() {
        assert_eq!(parse_driver_version("GCC version: 12.3.0"), None);
        assert_eq!(parse_driver_version("NVRM version: unknown"), None);
    }
}
