//! What `/metrics` shows, under SGLang's names, so that its dashboards and routers work here.
//!
//! Gauges are read from the engine's snapshot when they are scraped; histograms and counters are fed where things happen.

use std::time::Duration;

use prometheus::{
    Encoder, Gauge, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, Opts, Registry, TextEncoder,
};

use tandem_handoff::wire::transfer::Backend;

use crate::engine::Loads;

/// The content type of [`Metrics::render`].
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

const TTFT_SECONDS: [f64; 17] =
    [0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 10.0, 30.0, 60.0, 200.0];
const ITL_SECONDS: [f64; 16] =
    [0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.2, 0.5, 1.0, 4.0];
const E2E_SECONDS: [f64; 16] =
    [0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 10.0, 20.0, 60.0, 200.0, 600.0, 1800.0];
const TRANSFER_GB_S: [f64; 10] = [0.1, 0.5, 1.0, 5.0, 10.0, 25.0, 50.0, 100.0, 200.0, 400.0];
const TRANSFER_MS: [f64; 12] = [1.0, 2.0, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0, 2500.0, 5000.0];
const TRANSFER_MB: [f64; 9] = [1.0, 5.0, 10.0, 50.0, 100.0, 500.0, 1000.0, 5000.0, 10_000.0];

/// All metrics of one worker.
pub struct Metrics {
    registry: Registry,
    pub requests: RequestMetrics,
    pub transfer: TransferMetrics,
    gauges: Gauges,
    retracted: IntCounter,
}

/// Latencies and token counts of requests, fed by the HTTP rooms.
#[derive(Clone)]
pub struct RequestMetrics {
    pub time_to_first_token: Histogram,
    pub inter_token_latency: Histogram,
    pub e2e_latency: Histogram,
    pub prompt_tokens: IntCounter,
    pub generation_tokens: IntCounter,
    pub cached_tokens: IntCounter,
    pub requests: IntCounter,
    pub aborted: IntCounter,
    http_responses: IntCounterVec,
    http_seconds: HistogramVec,
}

/// The handoff's measurements, fed by the roles. A clone feeds the same series.
#[derive(Clone)]
pub struct TransferMetrics {
    speed_gb_s: Histogram,
    latency_ms: Histogram,
    bootstrap_ms: Histogram,
    alloc_ms: Histogram,
    total_mb: Histogram,
    bootstrap_failed: IntCounter,
    transfer_failed: IntCounter,
    checksum_failed: IntCounter,
    channels: IntCounterVec,
    handshakes_refused: IntCounterVec,
}

struct Gauges {
    running: Gauge,
    queued: Gauge,
    retracted: Gauge,
    used_tokens: Gauge,
    max_total_tokens: Gauge,
    token_usage: Gauge,
    bootstrap_queue: Gauge,
    inflight_queue: Gauge,
    prealloc_queue: Gauge,
    transfer_queue: Gauge,
    draining_pages: Gauge,
    quarantined_pages: Gauge,
    quarantined_pages_max: Gauge,
    gen_throughput: Gauge,
}

impl Metrics {
    pub fn new(model_name: &str, engine_type: &str) -> Metrics {
        let family =
            Family { registry: Registry::new(), model_name: model_name.into(), engine_type: engine_type.into() };
        Metrics {
            requests: RequestMetrics::new(&family),
            transfer: TransferMetrics::new(&family),
            gauges: Gauges::new(&family),
            retracted: family.counter("num_retracted_requests_total", "Sequences that lost their pages and came back."),
            registry: family.registry,
        }
    }

    /// Prometheus text, with the gauges of `loads`.
    pub fn render(&self, loads: &Loads) -> Vec<u8> {
        self.gauges.set(loads);
        self.retracted.inc_by(loads.retracted_total.saturating_sub(self.retracted.get()));
        let mut text = Vec::with_capacity(16 << 10);
        if let Err(error) = TextEncoder::new().encode(&self.registry.gather(), &mut text) {
            tracing::error!(%error, "the metrics cannot be encoded");
        }
        text
    }
}

impl RequestMetrics {
    fn new(family: &Family) -> Self {
        RequestMetrics {
            time_to_first_token: family.histogram(
                "time_to_first_token_seconds",
                "From the request's arrival to its first token.",
                &TTFT_SECONDS,
            ),
            inter_token_latency: family.histogram(
                "inter_token_latency_seconds",
                "Between two tokens of one sample.",
                &ITL_SECONDS,
            ),
            e2e_latency: family.histogram(
                "e2e_request_latency_seconds",
                "From the request's arrival to a sample's end.",
                &E2E_SECONDS,
            ),
            prompt_tokens: family.counter("prompt_tokens_total", "Prompt tokens of admitted samples."),
            generation_tokens: family.counter("generation_tokens_total", "Tokens given to clients."),
            cached_tokens: family.counter("cached_tokens_total", "Prompt tokens whose KV cache was reused."),
            requests: family.counter("num_requests_total", "Samples that ended with an answer."),
            aborted: family.counter("num_aborted_requests_total", "Samples that ended without an answer."),
            http_responses: family.counters(
                "http_responses_total",
                "Responses by endpoint and status.",
                &["endpoint", "status_code"],
            ),
            http_seconds: family.histograms(
                "http_request_duration_seconds",
                "From the request's head to the response's head.",
                &["endpoint"],
                &E2E_SECONDS,
            ),
        }
    }

    /// `endpoint` is a route's pattern, never a client's path, so that the number of series is bounded.
    pub fn responded(&self, endpoint: &str, status: u16, after: Duration) {
        let mut digits = [0; 3];
        self.http_responses.with_label_values(&[endpoint, status_text(status, &mut digits)]).inc();
        self.http_seconds.with_label_values(&[endpoint]).observe(after.as_secs_f64());
    }
}

fn status_text(status: u16, digits: &mut [u8; 3]) -> &str {
    *digits = [100, 10, 1].map(|unit| b'0' + (status / unit % 10) as u8);
    std::str::from_utf8(digits).unwrap_or("000")
}

impl TransferMetrics {
    fn new(family: &Family) -> Self {
        TransferMetrics {
            speed_gb_s: family.histogram(
                "kv_transfer_speed_gb_s",
                "KV bytes over the time from the first post to delivery.",
                &TRANSFER_GB_S,
            ),
            latency_ms: family.histogram(
                "kv_transfer_latency_ms",
                "From the first post of an attempt to its delivery.",
                &TRANSFER_MS,
            ),
            bootstrap_ms: family.histogram(
                "kv_transfer_bootstrap_ms",
                "From the request to the meeting of both halves.",
                &TRANSFER_MS,
            ),
            alloc_ms: family.histogram("kv_transfer_alloc_ms", "How long a prompt waited for pages.", &TRANSFER_MS),
            total_mb: family.histogram("kv_transfer_total_mb", "KV megabytes of an attempt.", &TRANSFER_MB),
            bootstrap_failed: family
                .counter("num_bootstrap_failed_reqs_total", "Attempts that ended before the transfer began."),
            transfer_failed: family.counter("num_transfer_failed_reqs_total", "Attempts that ended in the transfer."),
            checksum_failed: family.counter("kv_checksum_failed_total", "Attempts whose KV pages arrived damaged."),
            channels: family.own_counters(
                "handoff_channels_total",
                "Channels to workers of the other role that were opened, by what carries their pages.",
                &["backend"],
            ),
            handshakes_refused: family.own_counters(
                "handoff_handshakes_refused_total",
                "Connections of the handoff that did not pass their handshake.",
                &[],
            ),
        }
    }

    /// One delivered attempt: `bootstrap` until both halves met, `transfer` from the first post to delivery.
    pub fn delivered(&self, bytes: u64, bootstrap: Duration, transfer: Duration) {
        self.bootstrap_ms.observe(millis(bootstrap));
        self.latency_ms.observe(millis(transfer));
        self.total_mb.observe(bytes as f64 / 1e6);
        if !transfer.is_zero() {
            self.speed_gb_s.observe(bytes as f64 / 1e9 / transfer.as_secs_f64());
        }
    }

    pub fn allocated(&self, waited: Duration) {
        self.alloc_ms.observe(millis(waited));
    }

    pub fn bootstrap_failed(&self) {
        self.bootstrap_failed.inc();
    }

    pub fn transfer_failed(&self) {
        self.transfer_failed.inc();
    }

    pub fn checksum_failed(&self) {
        self.checksum_failed.inc();
    }

    pub fn handshake_refused(&self) {
        self.handshakes_refused.with_label_values::<&str>(&[]).inc();
    }

    /// A channel's pages go by this backend.
    pub fn channel_opened(&self, backend: Backend) {
        self.channels.with_label_values(&[backend.name()]).inc();
    }
}

fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

impl Gauges {
    fn new(family: &Family) -> Self {
        Gauges {
            running: family.gauge("num_running_reqs", "Sequences in the running batch."),
            queued: family.gauge("num_queue_reqs", "Sequences that wait for pages or a place."),
            retracted: family.gauge("num_retracted_reqs", "Sequences that wait to return after losing their pages."),
            used_tokens: family.gauge("num_used_tokens", "Tokens in the KV pool's used pages."),
            max_total_tokens: family.gauge("max_total_num_tokens", "Tokens that the KV pool holds."),
            token_usage: family.gauge("token_usage", "Share of the KV pool's pages that is not free."),
            bootstrap_queue: family.gauge("num_prefill_bootstrap_queue_reqs", "Prompts that wait for a reservation."),
            inflight_queue: family.gauge("num_prefill_inflight_queue_reqs", "Prompts whose pages are on their way."),
            prealloc_queue: family.gauge("num_decode_prealloc_queue_reqs", "Requests that wait for pages to reserve."),
            transfer_queue: family.gauge("num_decode_transfer_queue_reqs", "Reservations that wait for their pages."),
            draining_pages: family.gauge("num_draining_pages", "Pages of ended attempts without a proof of quiet."),
            gen_throughput: family.gauge("gen_throughput", "Output tokens per second over the last second of work."),
            quarantined_pages: family.gauge("num_quarantined_pages", "Of these, pages past the drain deadline."),
            quarantined_pages_max: family.gauge("max_quarantined_pages", "With more of them the worker exits."),
        }
    }

    fn set(&self, loads: &Loads) {
        let total = f64::from(loads.total_pages);
        let taken = f64::from(loads.total_pages.saturating_sub(loads.free_pages));
        self.running.set(loads.running.into());
        self.queued.set(loads.waiting.into());
        self.retracted.set(loads.retracted.into());
        self.used_tokens.set(loads.used_tokens as f64);
        self.max_total_tokens.set(total * f64::from(loads.page_size));
        self.token_usage.set(taken / total.max(1.0));
        self.bootstrap_queue.set(loads.bootstrap_queue.into());
        self.inflight_queue.set(loads.inflight_queue.into());
        self.prealloc_queue.set(loads.prealloc_queue.into());
        self.transfer_queue.set(loads.transfer_queue.into());
        self.draining_pages.set(loads.draining_pages.into());
        self.quarantined_pages.set(loads.quarantined_pages.into());
        self.quarantined_pages_max.set(loads.quarantine_pages_max.into());
        self.gen_throughput.set(loads.gen_throughput.into());
    }
}

/// Makes and registers metrics that share a prefix and two labels.
struct Family {
    registry: Registry,
    model_name: String,
    engine_type: String,
}

impl Family {
    fn opts(&self, name: &str, help: &str) -> Opts {
        self.named(format!("sglang:{name}"), help)
    }

    fn named(&self, name: String, help: &str) -> Opts {
        Opts::new(name, help).const_label("model_name", &self.model_name).const_label("engine_type", &self.engine_type)
    }

    fn register<T: prometheus::core::Collector + Clone + 'static>(&self, made: prometheus::Result<T>) -> T {
        let metric = made.expect("the names and buckets above are constants and valid");
        self.registry.register(Box::new(metric.clone())).expect("each name above is used once");
        metric
    }

    fn gauge(&self, name: &str, help: &str) -> Gauge {
        self.register(Gauge::with_opts(self.opts(name, help)))
    }

    fn counter(&self, name: &str, help: &str) -> IntCounter {
        self.register(IntCounter::with_opts(self.opts(name, help)))
    }

    fn counters(&self, name: &str, help: &str, labels: &[&str]) -> IntCounterVec {
        self.register(IntCounterVec::new(self.opts(name, help), labels))
    }

    /// For what SGLang has no name for.
    fn own_counters(&self, name: &str, help: &str, labels: &[&str]) -> IntCounterVec {
        self.register(IntCounterVec::new(self.named(format!("tandem_{name}"), help), labels))
    }

    fn histogram(&self, name: &str, help: &str, buckets: &[f64]) -> Histogram {
        let opts = HistogramOpts { common_opts: self.opts(name, help), buckets: buckets.to_vec() };
        self.register(Histogram::with_opts(opts))
    }

    fn histograms(&self, name: &str, help: &str, labels: &[&str], buckets: &[f64]) -> HistogramVec {
        let opts = HistogramOpts { common_opts: self.opts(name, help), buckets: buckets.to_vec() };
        self.register(HistogramVec::new(opts, labels))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_labels_are_those_of_sglang() {
        let metrics = Metrics::new("m\"1", "prefill");
        metrics.transfer.delivered(2_000_000_000, Duration::from_millis(3), Duration::from_secs(1));
        metrics.transfer.checksum_failed();
        metrics.requests.responded("/generate", 429, Duration::from_millis(1));
        metrics.transfer.channel_opened(Backend::Shm);
        metrics.transfer.handshake_refused();
        let loads = Loads { total_pages: 8, free_pages: 6, page_size: 16, used_tokens: 20, ..Loads::default() };
        let text = String::from_utf8(metrics.render(&loads)).unwrap();
        for line in [
            "sglang:token_usage{engine_type=\"prefill\",model_name=\"m\\\"1\"} 0.25",
            "sglang:num_used_tokens{engine_type=\"prefill\",model_name=\"m\\\"1\"} 20",
            "sglang:kv_transfer_speed_gb_s_sum{engine_type=\"prefill\",model_name=\"m\\\"1\"} 2",
            "sglang:kv_checksum_failed_total{engine_type=\"prefill\",model_name=\"m\\\"1\"} 1",
            "tandem_handoff_channels_total{backend=\"shm\",engine_type=\"prefill\",model_name=\"m\\\"1\"} 1",
            "tandem_handoff_handshakes_refused_total{engine_type=\"prefill\",model_name=\"m\\\"1\"} 1",
            "endpoint=\"/generate\",engine_type=\"prefill\",model_name=\"m\\\"1\",status_code=\"429\"} 1",
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
    }
}
