//! What was found, as text for people and as JSON for programs. *Pure.*

use std::fmt::Write as _;

use serde::Serialize;

#[derive(Serialize, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// Requests fail because of it.
    Error,
    /// It works, and somebody should know.
    Warning,
}

/// One thing that is not as it should be.
#[derive(Serialize, Clone, PartialEq, Debug)]
pub struct Finding {
    pub level: Level,
    /// The worker or pair.
    pub subject: String,
    pub what: String,
    pub fault: String,
    pub todo: String,
}

#[derive(Serialize, Clone, Debug)]
pub struct WorkerLine {
    pub url: String,
    pub worker_type: &'static str,
    pub ok: bool,
}

/// How a pair was checked.
#[derive(Serialize, Clone, Copy, PartialEq, Eq, Debug)]
#[serde(rename_all = "snake_case")]
pub enum Checked {
    /// A prompt went through it: the bootstrap port was tried from the decode worker's side.
    ByPrompt,
    /// The workers' own words were compared, and the bootstrap port was tried from here.
    FromHere,
}

#[derive(Serialize, Clone, Debug)]
pub struct PairLine {
    pub prefill: String,
    pub decode: String,
    pub ok: bool,
    pub checked: Checked,
    /// Of the prompt.
    pub took_ms: Option<u128>,
}

#[derive(Serialize, Clone, Debug, Default)]
pub struct Report {
    pub ok: bool,
    pub workers: Vec<WorkerLine>,
    pub pairs: Vec<PairLine>,
    pub findings: Vec<Finding>,
}

impl Report {
    pub fn is_well(&self) -> bool {
        self.findings.iter().all(|finding| finding.level != Level::Error)
    }

    pub fn json(&self) -> String {
        let mut text = serde_json::to_string_pretty(self).unwrap_or_default();
        text.push('\n');
        text
    }

    pub fn text(&self) -> String {
        let mut text = String::new();
        let mark = |ok: bool| if ok { "ok   " } else { "WRONG" };
        for worker in &self.workers {
            let _ = writeln!(text, "{} {:<7} {}", mark(worker.ok), worker.worker_type, worker.url);
        }
        for pair in &self.pairs {
            let how = match (pair.checked, pair.took_ms) {
                (Checked::ByPrompt, Some(ms)) => format!("a prompt went through in {ms} ms"),
                (Checked::ByPrompt, None) => "a prompt did not get through".to_owned(),
                (Checked::FromHere, _) => "no prompt was sent; bootstrap port tried from here only".to_owned(),
            };
            let _ = writeln!(text, "{} pair    {} -> {}: {how}", mark(pair.ok), pair.prefill, pair.decode);
        }
        for finding in &self.findings {
            let level = if finding.level == Level::Error { "ERROR" } else { "warning" };
            let _ = writeln!(text, "\n{level}: {}: {}", finding.subject, finding.what);
            let _ = writeln!(text, "  whose fault: {}\n  what to do:  {}", finding.fault, finding.todo);
        }
        let count = |level| self.findings.iter().filter(|finding| finding.level == level).count();
        let (errors, warnings) = (count(Level::Error), count(Level::Warning));
        let _ = match (errors, warnings) {
            (0, 0) => writeln!(text, "\nNothing is wrong."),
            _ => writeln!(text, "\nErrors: {errors}. Warnings: {warnings}."),
        };
        text
    }
}
