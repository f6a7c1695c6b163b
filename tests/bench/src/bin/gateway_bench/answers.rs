//! The bytes of the mock workers' answers, with places for the id: rendered once, copied and patched per request. *Pure.*

use memchr::memmem;

use crate::script::{ID_DIGITS, Script, Side, write_id};

const NO_ID: &str = "0000000000";
/// Digits of nanoseconds since 1970.
pub const STAMP_DIGITS: usize = 19;
const NO_STAMP: &str = "1000000000000000000";

/// Bytes with places for the id and, in the first event, for the time.
struct Template {
    bytes: Vec<u8>,
    ids: Vec<usize>,
    stamp: Option<usize>,
}

impl Template {
    fn new(text: String) -> Self {
        let ids = memmem::find_iter(text.as_bytes(), NO_ID).collect();
        Template { stamp: text.find(NO_STAMP), ids, bytes: text.into_bytes() }
    }

    fn append(&self, out: &mut Vec<u8>, id: u64, now_ns: u64) {
        let start = out.len();
        out.extend_from_slice(&self.bytes);
        for at in &self.ids {
            write_id(&mut out[start + at..], id);
        }
        if let Some(at) = self.stamp {
            let place = &mut out[start + at..start + at + STAMP_DIGITS];
            place.copy_from_slice(format!("{now_ns:019}").as_bytes());
        }
    }
}

/// All answers to chat that a mock gives.
pub struct Answers {
    whole: Template,
    /// P's answer in vLLM's fleets: what D must be told.
    transfer: Template,
    open: Template,
    first: Template,
    token: Template,
    last: Template,
}

impl Default for Answers {
    fn default() -> Self {
        let event = |role: &str, content: &str, created: &str, finish: &str, tail: &str| {
            let json = format!(
                r#"{{"id":"r{NO_ID}","object":"chat.completion.chunk","created":{created},"model":"mock","choices":[{{"index":0,"delta":{{{role}"content":"{content}"}},"logprobs":null,"finish_reason":{finish},"matched_stop":null}}],"usage":null}}"#
            );
            let event = format!("data: {json}\n\n");
            Template::new(format!("{:x}\r\n{event}\r\n{tail}", event.len()))
        };
        let done = "data: [DONE]\n\n";
        Answers {
            whole: whole(""),
            transfer: whole(&format!(
                r#","kv_transfer_params":{{"do_remote_prefill":true,"do_remote_decode":false,"remote_engine_id":"mock","remote_block_ids":[1,2,3],"remote_host":"127.0.0.1","remote_port":5600,"tp_size":1,"remote_request_id":"r{NO_ID}"}}"#
            )),
            open: Template::new(
                "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
                    .into(),
            ),
            first: event(r#""role":"assistant","#, " token", NO_STAMP, "null", ""),
            token: event("", " token", "1764547200", "null", ""),
            last: event("", "", "1764547200", "\"length\"", &format!("{:x}\r\n{done}\r\n0\r\n\r\n", done.len())),
        }
    }
}

fn whole(more: &str) -> Template {
    let words = "token ".repeat(64);
    let json = format!(
        r#"{{"id":"r{NO_ID}","object":"chat.completion","created":1764547200,"model":"mock","choices":[{{"index":0,"message":{{"role":"assistant","content":"{words}"}},"logprobs":null,"finish_reason":"length","matched_stop":null}}],"usage":{{"prompt_tokens":100,"total_tokens":164,"completion_tokens":64}}{more}}}"#
    );
    Template::new(json_answer(200, &json))
}

/// A whole JSON answer.
pub fn json_answer(status: u16, json: &str) -> String {
    let length = json.len();
    format!("HTTP/1.1 {status} Mock\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{json}")
}

/// One answer on its way: what has been produced of it.
pub struct Progress {
    id: u64,
    events: u32,
    sent: u32,
    silent_after: u32,
    each: bool,
    paced: bool,
    opened: bool,
    streamed: bool,
    transfer: bool,
    pub ended: bool,
}

/// What comes after the bytes that were produced.
#[derive(PartialEq, Eq, Debug)]
pub enum Then {
    /// More, once these are written.
    More,
    /// More, after the script's gap.
    Pause,
    Silence,
    End,
}

impl Progress {
    /// P answers one token, whole where a vLLM gateway asks it for a handoff; `stamp`s are the caller's.
    pub fn new(side: Side, script: &Script, transfer: bool) -> Self {
        let prefill = side == Side::Prefill;
        Progress {
            id: script.id,
            events: if prefill { 1 } else { script.events },
            sent: 0,
            silent_after: if prefill { u32::MAX } else { script.silent_after.unwrap_or(u32::MAX) },
            each: script.each && !prefill,
            paced: !script.gap.is_zero() && !prefill,
            opened: false,
            streamed: script.stream && !transfer,
            transfer,
            ended: false,
        }
    }

    /// Appends what can be said now, up to about 64 KiB.
    pub fn produce(&mut self, answers: &Answers, out: &mut Vec<u8>, now_ns: u64) -> Then {
        if !self.streamed {
            let whole = if self.transfer { &answers.transfer } else { &answers.whole };
            whole.append(out, self.id, now_ns);
            self.ended = true;
            return Then::End;
        }
        if !self.opened {
            self.opened = true;
            answers.open.append(out, self.id, now_ns);
        }
        while out.len() < 64 << 10 {
            if self.sent == self.silent_after {
                return Then::Silence;
            }
            if self.sent == self.events {
                answers.last.append(out, self.id, now_ns);
                self.ended = true;
                return Then::End;
            }
            let event = if self.sent == 0 { &answers.first } else { &answers.token };
            event.append(out, self.id, now_ns);
            self.sent += 1;
            if self.paced {
                return Then::Pause;
            }
            if self.each {
                return Then::More;
            }
        }
        Then::More
    }
}

/// The id's text as it stands in each event and each whole answer.
pub fn id_text(id: u64) -> [u8; 8 + ID_DIGITS] {
    let mut text = *b"\"id\":\"r0000000000\"";
    write_id(&mut text[7..], id);
    text
}
