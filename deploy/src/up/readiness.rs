//! Owns the wait until children answer their readiness endpoint with 200. Promises an end: all ready, or the limit with
//! the names of those that are not.

use std::time::{Duration, Instant};

use tokio::{
    task::JoinSet,
    time::{interval, sleep, timeout_at},
};

use super::{logs::Terminal, plan::ChildPlan};

const ASK_EVERY: Duration = Duration::from_millis(50);
const ANSWER_WITHIN: Duration = Duration::from_secs(2);
const REPORT_EVERY: Duration = Duration::from_secs(5);

#[derive(Debug, thiserror::Error)]
pub enum NotReady {
    #[error("not ready after {limit:?}: {}; allow more with --start-timeout-secs", .waiting.join(", "))]
    TimedOut { limit: Duration, waiting: Vec<String> },
    #[error("cannot make an HTTP client: {0}")]
    Client(#[from] reqwest::Error),
}

/// Waits until each of `plans` is ready, `limit` at most, and tells the terminal of each that is.
pub async fn all(plans: &[ChildPlan], limit: Duration, terminal: &Terminal) -> Result<(), NotReady> {
    // A proxy of the user's environment has no part in requests to this machine.
    let client = reqwest::Client::builder().no_proxy().timeout(ANSWER_WITHIN).build()?;
    let started = Instant::now();
    let deadline = tokio::time::Instant::now() + limit;
    let mut waiting: Vec<String> = plans.iter().map(|plan| plan.name.clone()).collect();
    let mut asking = JoinSet::new();
    for plan in plans {
        asking.spawn(ask(client.clone(), plan.name.clone(), plan.ready_url()));
    }
    let mut report = interval(REPORT_EVERY);
    report.tick().await;
    while !waiting.is_empty() {
        tokio::select! {
            answered = timeout_at(deadline, asking.join_next()) => match answered {
                Ok(Some(Ok(name))) => {
                    waiting.retain(|other| *other != name);
                    let done = plans.len() - waiting.len();
                    let seconds = started.elapsed().as_secs_f32();
                    terminal.line("up", &format!("{name} is ready after {seconds:.1} s ({done} of {})", plans.len()));
                }
                Ok(_) => break,
                Err(_) => return Err(NotReady::TimedOut { limit, waiting }),
            },
            _ = report.tick() => {
                let seconds = started.elapsed().as_secs();
                terminal.line("up", &format!("still waiting for {} after {seconds} s", waiting.join(", ")));
            }
        }
    }
    Ok(())
}

/// Asks until the answer is 200.
async fn ask(client: reqwest::Client, name: String, url: String) -> String {
    loop {
        match client.get(&url).send().await {
            Ok(response) if response.status().is_success() => return name,
            _ => sleep(ASK_EVERY).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::TcpListener,
    };

    use super::{super::plan::tests::fleet, *};

    /// A server that answers 503 so many times, then 200.
    async fn server(mut refusals: usize) -> ChildPlan {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
        let mut plan = fleet("1p1d").remove(0);
        plan.port = listener.local_addr().expect("address").port();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let mut request = [0; 1024];
                // All of a request this short comes at once; what it asks for makes no difference.
                let _bytes = stream.read(&mut request).await;
                let status = if refusals > 0 { "503 Service Unavailable" } else { "200 OK" };
                refusals = refusals.saturating_sub(1);
                let answer = format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
                stream.write_all(answer.as_bytes()).await.ok();
            }
        });
        plan
    }

    #[tokio::test]
    async fn waits_through_refusals() {
        let plans = [server(2).await];
        all(&plans, Duration::from_secs(20), &Terminal::new([])).await.expect("ready in the end");
    }

    #[tokio::test]
    async fn names_those_that_are_not_ready() {
        let mut late = server(usize::MAX).await;
        late.name = "decode-7".to_owned();
        let plans = [server(0).await, late];
        let error = all(&plans, Duration::from_millis(300), &Terminal::new([])).await.expect_err("never ready");
        assert!(matches!(&error, NotReady::TimedOut { waiting, .. } if waiting == &["decode-7"]), "{error}");
    }
}
