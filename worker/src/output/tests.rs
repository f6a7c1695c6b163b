//! Stop rules and detokenising over tokens that are bytes.
use proptest::prelude::*;

use super::*;

/// A token below 256 is that byte.
#[derive(Default)]
struct Bytes(Vec<u8>);

impl Detokenize for Bytes {
    fn push(&mut self, token: u32, text: &mut String) {
        self.0.push(token as u8);
        match std::str::from_utf8(&self.0) {
            Ok(whole) => {
                text.push_str(whole);
                self.0.clear();
            }
            Err(error) => {
                let valid = error.valid_up_to();
                text.push_str(std::str::from_utf8(&self.0[..valid]).unwrap());
                self.0.drain(..valid);
            }
        }
    }

    fn finish(&mut self, text: &mut String) {
        text.push_str(&String::from_utf8_lossy(&self.0));
        self.0.clear();
    }
}

fn params(stop: &[&str]) -> SamplingParams {
    SamplingParams { stop: stop.iter().map(|&stop| stop.to_owned()).collect(), ..SamplingParams::greedy(1000) }
}

const EOS: u32 = 0;

/// Each piece of text as it was shown, the reason, and how many tokens were taken.
fn say(params: &SamplingParams, text: &[u8]) -> (Vec<String>, Option<FinishReason>, usize) {
    let mut output = Output::new(Box::new(Bytes::default()), params, &[EOS], params.max_tokens);
    let mut pieces = vec![];
    for (index, &byte) in text.iter().enumerate() {
        let said = output.push(u32::from(byte));
        pieces.push(said.text);
        if let Some(end) = said.end {
            pieces.push(end.text);
            return (pieces, Some(end.reason), index + 1);
        }
    }
    (pieces, None, text.len())
}

#[test]
fn a_stop_string_over_token_borders_never_leaks() {
    let (pieces, reason, taken) = say(&params(&["END"]), b"xENyEND!");
    assert_eq!(pieces, ["x", "", "", "ENy", "", "", "", ""]);
    assert_eq!((reason, taken), (Some(FinishReason::StopString("END".into())), 7));
}

#[test]
fn text_that_only_looked_like_a_stop_comes_with_the_length() {
    let (pieces, reason, _) = say(&SamplingParams { max_tokens: 3, ..params(&["END"]) }, b"xEN");
    assert_eq!(pieces, ["x", "", "", "EN"]);
    assert_eq!(reason, Some(FinishReason::Length));
}

#[test]
fn the_stop_is_kept_when_asked_for() {
    let (pieces, ..) = say(&SamplingParams { include_stop: true, ..params(&["b"]) }, b"abc");
    assert_eq!(pieces.concat(), "ab");
    let with_token = SamplingParams { include_stop: true, stop_token_ids: vec![98], ..params(&[]) };
    assert_eq!(say(&with_token, b"abc").0.concat(), "ab");
}

#[test]
fn eos_ends_unless_ignored_and_shows_nothing() {
    let (pieces, reason, taken) = say(&params(&["bX"]), b"ab\0c");
    assert_eq!((pieces.concat().as_str(), reason, taken), ("ab", Some(FinishReason::StopToken(EOS)), 3));
    let ignoring = SamplingParams { ignore_eos: true, max_tokens: 4, ..params(&[]) };
    assert_eq!(say(&ignoring, b"ab\0c").1, Some(FinishReason::Length));
}

#[test]
fn nothing_but_the_length_ends_before_min_tokens() {
    let long = SamplingParams { min_tokens: 2, stop_token_ids: vec![97], ..params(&["b"]) };
    let (pieces, reason, taken) = say(&long, b"abab");
    assert_eq!((pieces.concat().as_str(), reason, taken), ("ab", Some(FinishReason::StopToken(97)), 3));
}

#[test]
fn characters_are_never_cut() {
    let (pieces, ..) = say(&SamplingParams { max_tokens: 5, ..params(&["é!"]) }, "aé?é".as_bytes());
    assert_eq!(pieces, ["a", "", "", "é?", "", "\u{fffd}"]);
    let (pieces, ..) = say(&params(&["€"]), "¢€".as_bytes());
    assert_eq!(pieces.concat(), "¢");
}

proptest! {
    #[test]
    fn equals_a_search_over_the_whole_text(
        text in "[abcé]{0,24}",
        stops in prop::collection::vec("[abcé]{1,4}", 0..3),
        include_stop: bool,
    ) {
        let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
        let params = SamplingParams { include_stop, ..params(&stops) };
        let (pieces, reason, taken) = say(&params, text.as_bytes());
        // The oracle: the first prefix that contains a stop string ends the answer, at the earliest start in it.
        let prefix = (0..=text.len()).filter(|&n| text.is_char_boundary(n)).map(|n| &text[..n])
            .find(|prefix| stops.iter().any(|stop| prefix.contains(stop)));
        match prefix {
            Some(prefix) => {
                let (start, stop) = stops.iter().filter_map(|stop| Some((prefix.find(stop)?, stop)))
                    .min_by_key(|&(start, _)| start).unwrap();
                let end = if include_stop { start + stop.len() } else { start };
                prop_assert_eq!(pieces.concat(), &prefix[..end]);
                prop_assert_eq!(reason, Some(FinishReason::StopString(stop.to_string())));
                prop_assert_eq!(taken, prefix.len());
            }
            None => {
                prop_assert_eq!(reason, None);
                let shown = pieces.concat();
                prop_assert!(text.starts_with(&shown));
                prop_assert!(text.len() - shown.len() < stops.iter().map(|stop| stop.len()).max().unwrap_or(1));
            }
        }
    }
}
