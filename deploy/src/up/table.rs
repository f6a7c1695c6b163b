//! Owns what `up` shows once all is ready: the table for people and the ready file for programs. *Pure* but for the
//! functions that write the file.

use std::{
    fs::File,
    io::{self, Write as _},
    path::{Path, PathBuf},
};

use super::plan::{ChildPlan, ChildRole};

/// One row per child, gateway first, columns as wide as their widest cell.
pub fn render(children: &[(&ChildPlan, u32)]) -> String {
    let header = ["NAME", "ROLE", "LISTENS ON", "ALSO", "PID"].map(str::to_owned);
    let mut rows = vec![header];
    rows.extend(gateway_first(children).into_iter().map(|(plan, pid)| row(plan, pid)));
    let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
    let widths: [usize; 5] = std::array::from_fn(width);
    let mut text = String::new();
    for row in &rows {
        let cells: Vec<String> = row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        text.push_str(cells.join("  ").trim_end());
        text.push('\n');
    }
    text
}

fn gateway_first<'a>(children: &[(&'a ChildPlan, u32)]) -> Vec<(&'a ChildPlan, u32)> {
    let mut sorted = children.to_vec();
    sorted.sort_by_key(|(plan, _)| plan.role != ChildRole::Gateway);
    sorted
}

fn row(plan: &ChildPlan, pid: u32) -> [String; 5] {
    let also = match (plan.metrics_url(), plan.bootstrap_port) {
        (Some(metrics), _) => format!("metrics {metrics}"),
        (None, Some(port)) => format!("handoff {}:{port}", plan.host),
        (None, None) => String::new(),
    };
    [plan.name.clone(), plan.role.mode().to_owned(), plan.url(), also, pid.to_string()]
}

/// The JSON of `--ready-file`; `supervisor` is the process id of `up` itself.
pub fn ready_json(children: &[(&ChildPlan, u32)], supervisor: u32) -> serde_json::Value {
    let gateway = children.iter().find(|(plan, _)| plan.role == ChildRole::Gateway).map(|(plan, _)| *plan);
    let child = |(plan, pid): &(&ChildPlan, u32)| {
        serde_json::json!({
            "name": plan.name, "role": plan.role.mode(), "pid": pid,
            "url": plan.url(), "port": plan.port, "bootstrap_port": plan.bootstrap_port,
        })
    };
    serde_json::json!({
        "url": gateway.map(ChildPlan::url),
        "metrics_url": gateway.and_then(ChildPlan::metrics_url),
        "pid": supervisor,
        "children": children.iter().map(child).collect::<Vec<_>>(),
    })
}

/// Writes beside `path` and renames, so that a reader finds either nothing or all of it.
pub fn write_ready_file(path: &Path, value: &serde_json::Value) -> io::Result<()> {
    let beside = beside(path);
    let mut file = File::create(&beside)?;
    writeln!(file, "{value}")?;
    file.sync_all()?;
    std::fs::rename(&beside, path)
}

/// Whether [`write_ready_file`] will find a place to write; leaves nothing there.
pub fn try_ready_file(path: &Path) -> io::Result<()> {
    if path.is_dir() {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    let beside = beside(path);
    File::create(&beside)?;
    std::fs::remove_file(&beside)
}

fn beside(path: &Path) -> PathBuf {
    let mut beside = path.as_os_str().to_owned();
    beside.push(format!(".{}.part", std::process::id()));
    beside.into()
}

#[cfg(test)]
mod tests {
    use super::{super::plan::tests::fleet, *};

    #[test]
    fn the_table_names_every_address_once_gateway_first() {
        let fleet = fleet("1p1d");
        let children: Vec<(&ChildPlan, u32)> = fleet.iter().zip(101..).collect();
        let rendered = render(&children);
        let lines: Vec<Vec<&str>> = rendered.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[0], ["NAME", "ROLE", "LISTENS", "ON", "ALSO", "PID"]);
        let metrics = "http://127.0.0.1:29000/metrics";
        assert_eq!(lines[1], ["gateway", "gateway", "http://127.0.0.1:30000", "metrics", metrics, "103"]);
        assert_eq!(lines[2], ["prefill-0", "prefill", "http://127.0.0.1:20002", "handoff", "127.0.0.1:20001", "101"]);
        assert_eq!(lines[3], ["decode-0", "decode", "http://127.0.0.1:20003", "102"]);
        let columns: Vec<_> = rendered.lines().map(|line| line.rfind("  ").map(|end| end + 2)).collect();
        assert!(columns.iter().all(|column| *column == columns[0]), "the last column lines up:\n{rendered}");
    }

    #[test]
    fn the_ready_file_is_complete_when_it_appears() {
        let fleet = fleet("1p1d");
        let children: Vec<(&ChildPlan, u32)> = fleet.iter().zip(101..).collect();
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("ready.json");
        write_ready_file(&path, &ready_json(&children, 100)).expect("written");
        let value: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).expect("read")).expect("JSON");
        assert_eq!(value["url"], "http://127.0.0.1:30000");
        assert_eq!(value["metrics_url"], "http://127.0.0.1:29000/metrics");
        assert_eq!(value["pid"], 100);
        assert_eq!(value["children"][0]["bootstrap_port"], 20001);
        assert_eq!(value["children"][1]["bootstrap_port"], serde_json::Value::Null);
        assert_eq!(value["children"][2]["role"], "gateway");
        assert_eq!(std::fs::read_dir(folder.path()).expect("list").count(), 1);
    }
}
