//! A bounded run of every target, the same on every machine, and for each a planted fault that it must find.

use std::hint::black_box;

use bytes::Bytes;
use tandem_fabric::tcp::frame::Header;
use tandem_fuzz::{
    Target,
    drive::{Finding, Until, fuzz},
    targets::{
        all,
        answers::{self, Answers},
        frames::Frames,
        greetings::Greetings,
        handoff::Handoff,
        merges::{self, Merges},
        models::Models,
        settings::{self, Settings},
        streams::Streams,
        tickets::Tickets,
    },
};
use tandem_handoff::wire::{Frame, WireError, hello::Greeting};
use tandem_model::{LoadOptions, Model, ModelError};

const SEED: u64 = 0x7A0D_EE11;

fn keeps_its_promises(name: &str, mutants: u64) {
    let targets = all();
    let target = targets.iter().find(|target| target.name() == name).expect("a target of that name");
    match fuzz(&**target, SEED, Until::Mutants(mutants)) {
        Ok(report) => println!("{name}: {report:?}"),
        Err(finding) => {
            let at = finding.save(&**target);
            panic!("{name}: {}\ninput: {at:?}", finding.what);
        }
    }
}

#[test]
fn control_frames() {
    keeps_its_promises("frames", 200_000);
}

#[test]
fn greetings() {
    keeps_its_promises("greetings", 200_000);
}

#[test]
fn tickets() {
    keeps_its_promises("tickets", 50_000);
}

#[test]
fn answers_of_workers() {
    keeps_its_promises("answers", 50_000);
}

#[test]
fn merges_of_two_answers() {
    keeps_its_promises("merges", 50_000);
}

#[test]
fn gateway_settings() {
    keeps_its_promises("settings", 3_000);
}

#[test]
fn data_streams() {
    keeps_its_promises("streams", 6_000);
}

#[test]
fn gguf_files() {
    keeps_its_promises("gguf", 1_500);
}

#[test]
fn safetensors_files() {
    keeps_its_promises("safetensors", 1_500);
}

#[test]
fn orders_of_the_handoff() {
    keeps_its_promises("handoff", 20_000);
}

/// What the target finds in a faulty implementation.
fn finding(target: &dyn Target, mutants: u64) -> Finding {
    fuzz(target, SEED, Until::Mutants(mutants)).expect_err("the planted fault is found")
}

/// As a decoder that reserves room for as many entries as the bytes claim, up to 16 million.
fn trusting(bytes: &[u8]) {
    if let Some(last) = bytes.last_chunk() {
        let claimed: Vec<u64> = Vec::with_capacity((u32::from_le_bytes(*last) as usize).min(16 << 20));
        assert!(black_box(claimed).is_empty());
    }
}

#[test]
fn a_decoder_that_trusts_a_length_is_found() {
    let frames = Frames(|bytes| {
        trusting(bytes);
        Frame::decode(bytes)
    });
    let found = finding(&frames, 10_000);
    assert!(found.what.contains("bytes of memory"), "{}", found.what);
    assert!(found.input.len() <= 8, "it was made small: {found:?}");
    let greetings = Greetings(|bytes| {
        trusting(bytes);
        Greeting::decode(bytes)
    });
    assert!(finding(&greetings, 10_000).what.contains("bytes of memory"));
}

/// As a decoder that looks at what it needs and not at what follows.
fn lenient<T>(bytes: &[u8], decode: fn(&[u8]) -> Result<T, WireError>) -> Result<T, WireError> {
    match decode(bytes) {
        Err(WireError::Trailing(more)) => decode(&bytes[..bytes.len() - more]),
        other => other,
    }
}

#[test]
fn a_decoder_that_ignores_trailing_bytes_is_found() {
    let found = finding(&Frames(|bytes| lenient(bytes, Frame::decode)), 10_000);
    assert!(found.what.contains("another encoding"), "{}", found.what);
    let found = finding(&Greetings(|bytes| lenient(bytes, Greeting::decode)), 10_000);
    assert!(found.what.contains("another encoding"), "{}", found.what);
}

#[test]
fn a_splice_that_leaves_the_clients_own_room_is_found() {
    // Knows the fields by their text, and so misses one that is spelt with an escape.
    let careless = Tickets(|input, scanned, fields| {
        if !input.windows(6).any(|six| six == b"\\u005f") {
            return scanned.splice(fields);
        }
        let at = input.iter().position(|&byte| byte == b'{').expect("an object") + 1;
        Bytes::from([&input[..at], fields.as_bytes(), b",", &input[at..]].concat())
    });
    let found = finding(&careless, 10_000);
    assert!(found.what.contains("panics"), "{}", found.what);
}

#[test]
fn a_stream_that_is_judged_by_its_reads_is_found() {
    // Takes a `[DONE]` anywhere in a read for the end.
    let hasty = Answers(|input, read_bytes| {
        let whole = input.chunks(read_bytes).any(|read| read.windows(6).any(|six| six == b"[DONE]"));
        if whole { (input.to_vec(), "complete".into()) } else { answers::pass(input, read_bytes) }
    });
    let found = finding(&hasty, 10_000);
    assert!(found.what.contains("panics"), "{}", found.what);
}

#[test]
fn a_merge_that_forgets_the_top_logprobs_is_found() {
    let forgetful = Merges(|merge, prefill, decode| {
        let prefill = String::from_utf8_lossy(prefill).replace("input_top_logprobs", "other_top_logprobs");
        merges::merged(merge, prefill.as_bytes(), decode)
    });
    let found = finding(&forgetful, 10_000);
    assert!(found.what.contains("panics"), "{}", found.what);
}

#[test]
fn a_reader_of_settings_that_knows_one_format_better_is_found() {
    let found = finding(
        &Settings(|path| {
            let mut config = settings::read(path)?;
            if path.extension().is_some_and(|end| end == "yaml") {
                config.listen.body_bytes_max += 1;
            }
            Ok(config)
        }),
        1_000,
    );
    assert!(found.what.contains("come back"), "{}", found.what);
}

#[test]
fn a_header_that_ignores_its_magic_is_found() {
    let found = finding(
        &Streams::with(|bytes| {
            let mut bytes = *bytes;
            bytes[..4].copy_from_slice(b"TKV1");
            Header::decode(&bytes)
        }),
        500,
    );
    assert!(found.what.contains("another encoding"), "{}", found.what);
}

#[test]
fn a_loader_that_trusts_a_count_is_found() {
    fn load(path: &str) -> Result<Model, ModelError> {
        let file = if path.ends_with(".gguf") { path.to_owned() } else { format!("{path}/model.safetensors") };
        let bytes = std::fs::read(file).unwrap_or_default();
        // Tensors of a GGUF file stand at byte 8, the header's bytes of a safetensors file at 0.
        let at = if path.ends_with(".gguf") { 8 } else { 0 };
        if let Some(count) = bytes.get(at..).and_then(|bytes| bytes.first_chunk()) {
            let room: Vec<u8> = Vec::with_capacity((u64::from_le_bytes(*count) as usize).min(1 << 30));
            assert!(black_box(room).is_empty());
        }
        tandem_model::load(path, &LoadOptions::default())
    }
    for models in [Models::gguf(), Models::safetensors()] {
        let found = finding(&models.with(load), 1_000);
        assert!(found.what.contains("bytes of memory"), "{}", found.what);
    }
}

#[test]
fn a_fabric_that_settles_a_piece_twice_is_found() {
    let found = finding(&Handoff { settles_twice: true }, 10_000);
    assert!(found.what.contains("while a write"), "{}", found.what);
}
