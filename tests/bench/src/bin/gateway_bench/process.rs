//! What a process and its children have cost: processor time and memory, out of `/proc`.

use std::fs;
use std::time::Duration;

use crate::Failure;
use crate::script::number;

#[derive(Clone, Copy, Default, Debug)]
pub struct Cost {
    pub cpu: Duration,
    pub resident_kib: u64,
    pub peak_kib: u64,
}

/// A process and everything it started.
#[derive(Clone, Copy, Debug)]
pub struct Tree(pub u32);

impl Tree {
    pub fn cost(self) -> Result<Cost, Failure> {
        let mut cost = one(self.0)?;
        for child in children(self.0) {
            let more = Tree(child).cost()?;
            cost.cpu += more.cpu;
            cost.resident_kib += more.resident_kib;
            cost.peak_kib += more.peak_kib;
        }
        Ok(cost)
    }

    /// The peak is counted from now on.
    pub fn forget_peak(self) -> Result<(), Failure> {
        fs::write(format!("/proc/{}/clear_refs", self.0), "5").map_err(Failure::io("the peak is not reset"))?;
        children(self.0).into_iter().try_for_each(|child| Tree(child).forget_peak())
    }
}

fn one(pid: u32) -> Result<Cost, Failure> {
    let read = |name: &str| {
        fs::read_to_string(format!("/proc/{pid}/{name}")).map_err(Failure::io("the process has ended, or is not ours"))
    };
    let mut cost = Cost::default();
    // On-processor nanoseconds of each thread that lives; the ticks of `stat` are too coarse for a second.
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).map_err(Failure::io("the process has ended"))?;
    for task in tasks.flatten() {
        let text = fs::read_to_string(task.path().join("schedstat")).unwrap_or_default();
        let nanos = text.split_whitespace().next().and_then(|n| n.parse().ok()).unwrap_or(0);
        cost.cpu += Duration::from_nanos(nanos);
    }
    for line in read("status")?.lines() {
        let kib = |text: &str| number(text.trim().trim_end_matches(" kB").as_bytes());
        if let Some(text) = line.strip_prefix("VmRSS:") {
            cost.resident_kib = kib(text)?;
        } else if let Some(text) = line.strip_prefix("VmHWM:") {
            cost.peak_kib = kib(text)?;
        }
    }
    Ok(cost)
}

fn children(pid: u32) -> Vec<u32> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let lists = tasks.filter_map(|task| fs::read_to_string(task.path().join("children")).ok());
    lists.flat_map(|list| list.split_whitespace().filter_map(|n| n.parse().ok()).collect::<Vec<_>>()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_has_costs() {
        let cost = Tree(std::process::id()).cost().unwrap();
        assert!(cost.resident_kib > 0 && cost.peak_kib >= cost.resident_kib && !cost.cpu.is_zero());
    }
}
