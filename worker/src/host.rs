//! What this machine offers: cores and memory.

use std::fs;

/// Assumed where the operating system does not say.
const AVAILABLE_BYTES_UNKNOWN: u64 = 8 << 30;

/// Cores that this process may use.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Names the running kernel: processes that read the same name here can share memory. Empty where it is not known.
pub fn boot_id() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").map_or_else(|_| String::new(), |text| text.trim().to_owned())
}

/// Memory that is free for use now, within this process's container.
pub fn available_bytes() -> u64 {
    let machine = fs::read_to_string("/proc/meminfo").ok().and_then(|text| meminfo_available(&text));
    let container = container_left("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current");
    match (machine, container) {
        (Some(machine), Some(container)) => machine.min(container),
        (Some(bytes), None) | (None, Some(bytes)) => bytes,
        (None, None) => AVAILABLE_BYTES_UNKNOWN,
    }
}

fn meminfo_available(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib << 10)
}

/// `None` where there is no limit ("max") or no such file.
fn container_left(limit: &str, used: &str) -> Option<u64> {
    let number = |path: &str| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    Some(number(limit)?.saturating_sub(number(used)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_is_read_in_kibibytes() {
        assert_eq!(meminfo_available("MemTotal: 9 kB\nMemAvailable:    2048 kB\n"), Some(2 << 20));
        assert_eq!(meminfo_available("MemTotal: 9 kB\n"), None);
        assert!(available_bytes() > 0 && cores() > 0);
        assert_eq!(boot_id(), boot_id());
    }
}
