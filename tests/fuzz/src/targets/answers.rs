//! A worker's stream of events on its way through the gateway: however it is cut into reads, the same bytes leave, they
//! are the beginning of those that came, and the answer is judged the same.

use bytes::{Bytes, BytesMut};
use tandem_gateway::{
    Side,
    http1::take_response_head,
    request::Endpoint,
    stream::{Answer, Expected, Meaning},
};

use crate::Target;

/// What leaves for the bytes that came in reads of so many bytes, and how it ends.
pub type Pass = fn(&[u8], usize) -> (Vec<u8>, String);

/// Tries this way through.
pub struct Answers(pub Pass);

impl Answers {
    pub fn real() -> Self {
        Self(pass)
    }
}

/// One leg's answer with status 200.
pub fn answer(side: Side, content_type: &str, endpoint: Endpoint, samples: usize) -> Answer {
    let text = format!("HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\n\r\n");
    let head = take_response_head(&mut BytesMut::from(text.as_bytes())).expect("a good head").expect("a whole head");
    Answer::new(side, "http://worker", &head, Expected { endpoint, samples })
}

/// The gateway's own.
pub fn pass(input: &[u8], read_bytes: usize) -> (Vec<u8>, String) {
    let mut answer = answer(Side::Decode, "text/event-stream", Endpoint::Chat, 2);
    let mut out = Vec::new();
    for read in input.chunks(read_bytes) {
        let step = answer.push(Bytes::copy_from_slice(read));
        out.extend_from_slice(&step.forward);
        if let Some(end) = end_of(&step.meaning) {
            return (out, end);
        }
    }
    let step = answer.end(true);
    out.extend_from_slice(&step.forward);
    (out, end_of(&step.meaning).expect("an end is one"))
}

fn end_of(meaning: &Meaning) -> Option<String> {
    match meaning {
        Meaning::None | Meaning::Token => None,
        Meaning::Complete => Some("complete".into()),
        Meaning::Failed(failure) => Some(format!("{} {}: {}", failure.status, failure.code, failure.message)),
    }
}

impl Target for Answers {
    fn name(&self) -> &'static str {
        "answers"
    }

    fn seeds(&self) -> Vec<Vec<u8>> {
        let streams = [
            ": hi\n\ndata: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a data: [DONE] b\"}}]}\n\n",
            "data: {\"choices\":[{\"index\":1,\"finish_reason\":\"stop\"},{\"index\":0,\"finish_reason\":\"length\"}]}\r\n\r\n",
            "data: {\"text\":\"x\",\"index\":1,\"meta_info\":{\"finish_reason\":{\"type\":\"abort\",\"status_code\":503}}}\n\n",
            "event: error\ndata: {\"type\":\"error\",\"error\":{\"message\":\"m\",\"code\":429}}\n\n",
            "data: {\"type\":\"response.completed\",\"response\":{}}\n\ndata: [DONE]\n\n",
            "data: {\"a\":\ndata: 1}\n\r\ndata:[DONE]\n\n",
        ];
        let done = streams[0].to_owned() + streams[1] + "data: [DONE]\n\n";
        streams.iter().map(|stream| (*stream).to_owned()).chain([done]).map(String::into_bytes).collect()
    }

    fn words(&self) -> &'static [&'static str] {
        &[
            "\n\n",
            "\r\n\r\n",
            "\n",
            "data: ",
            "data:",
            "data: [DONE]\n\n",
            "\"finish_reason\":\"stop\"",
            "\"error\":{}",
            "\"index\":1",
            "null",
            "{",
            "}",
            "\\u0061",
        ]
    }

    fn memory_bytes_max(&self, input_bytes: usize) -> usize {
        (1 << 20) + 64 * input_bytes
    }

    fn run(&self, input: &[u8]) -> String {
        let (whole, end) = (self.0)(input, input.len().max(1));
        assert!(input.starts_with(&whole), "what leaves is what came");
        assert!(end != "complete" || whole.ends_with(b"\n"), "an answer is complete behind its last event");
        for read_bytes in [1, 2, 3, 7, 61] {
            let got = (self.0)(input, read_bytes);
            assert_eq!(got, (whole.clone(), end.clone()), "reads of {read_bytes} bytes");
        }
        end.split(':').next().unwrap_or_default().to_owned()
    }
}
