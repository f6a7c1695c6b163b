//! A cursor over JSON text: walks what is asked for and skips the rest, checking the grammar on its way, in one pass and
//! without allocating. Spans come out as positions, so that a caller can cut and splice the text itself. Whether strings
//! are UTF-8 is the caller's to check. *Pure.*

use std::borrow::Cow;
use std::ops::Range;

/// Objects and lists inside each other at most.
const DEPTH_MAX: usize = 1024;
const ONES: u64 = 0x0101_0101_0101_0101;
const HIGH_BITS: u64 = 0x8080_8080_8080_8080;

/// The text is no JSON, or nested deeper than [`DEPTH_MAX`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NotJson;

type Walked<T> = Result<T, NotJson>;

/// Where the walk stands.
#[derive(Clone, Debug)]
pub struct Cursor<'a> {
    text: &'a [u8],
    at: usize,
}

/// What stands between a string's quotes.
#[derive(Clone, Copy, Debug)]
pub struct Text<'a> {
    raw: &'a [u8],
    has_escapes: bool,
}

impl<'a> Text<'a> {
    pub fn is_empty(self) -> bool {
        self.raw.is_empty()
    }

    /// The string that is meant; what is no UTF-8 or half a character is replaced.
    pub fn meant(self) -> Cow<'a, str> {
        if !self.has_escapes {
            return String::from_utf8_lossy(self.raw);
        }
        let quoted = [b"\"", self.raw, b"\""].concat();
        serde_json::from_slice::<String>(&quoted)
            .map_or_else(|_| Cow::Owned(String::from_utf8_lossy(self.raw).into_owned()), Cow::Owned)
    }

    /// The bytes between the quotes where they are what is meant, else the decoded ones.
    pub fn name(&self) -> Cow<'a, [u8]> {
        match self.has_escapes {
            false => Cow::Borrowed(self.raw),
            true => Cow::Owned(self.meant().into_owned().into_bytes()),
        }
    }
}

impl<'a> Cursor<'a> {
    pub fn new(text: &'a [u8]) -> Self {
        Cursor { text, at: 0 }
    }

    pub fn position(&self) -> usize {
        self.at
    }

    /// The first byte of what comes, behind white space.
    pub fn peek(&mut self) -> Walked<u8> {
        while let Some(byte) = self.text.get(self.at) {
            match byte {
                b' ' | b'\n' | b'\t' | b'\r' => self.at += 1,
                byte => return Ok(*byte),
            }
        }
        Err(NotJson)
    }

    /// Whether only white space is left.
    pub fn is_at_end(&mut self) -> bool {
        self.peek().is_err()
    }

    /// Goes behind the opening brace or bracket of the value that comes, if it has this one.
    pub fn enter(&mut self, open: u8) -> Walked<bool> {
        let enters = self.peek()? == open;
        self.at += usize::from(enters);
        Ok(enters)
    }

    /// The name of the next field of the object that was entered; the cursor then stands in front of its value. `None`
    /// behind the closing brace. `first` is true once per object.
    pub fn field(&mut self, first: &mut bool) -> Walked<Option<Text<'a>>> {
        if !self.separated(first, b'}')? {
            return Ok(None);
        }
        self.key().map(Some)
    }

    /// Whether the list that was entered has a next item; false behind the closing bracket.
    pub fn item(&mut self, first: &mut bool) -> Walked<bool> {
        self.separated(first, b']')
    }

    fn separated(&mut self, first: &mut bool, close: u8) -> Walked<bool> {
        let next = self.peek()?;
        if next == close {
            self.at += 1;
            // A comma in front of the close would have been taken by the branch below.
            return Ok(false);
        }
        if std::mem::take(first) {
            return Ok(true);
        }
        if next != b',' {
            return Err(NotJson);
        }
        self.at += 1;
        if self.peek()? == close { Err(NotJson) } else { Ok(true) }
    }

    fn key(&mut self) -> Walked<Text<'a>> {
        let name = self.text()?;
        if self.peek()? != b':' {
            return Err(NotJson);
        }
        self.at += 1;
        Ok(name)
    }

    /// The string that comes.
    pub fn text(&mut self) -> Walked<Text<'a>> {
        if self.peek()? != b'"' {
            return Err(NotJson);
        }
        self.at += 1;
        let start = self.at;
        let mut has_escapes = false;
        loop {
            self.at += plain_bytes(&self.text[self.at..]);
            match self.text.get(self.at) {
                Some(b'"') => break,
                Some(b'\\') => {
                    has_escapes = true;
                    self.escape()?;
                }
                _ => return Err(NotJson),
            }
        }
        self.at += 1;
        Ok(Text { raw: &self.text[start..self.at - 1], has_escapes })
    }

    fn escape(&mut self) -> Walked<()> {
        match self.text.get(self.at + 1) {
            Some(b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => self.at += 2,
            Some(b'u') => {
                let digits = self.text.get(self.at + 2..self.at + 6).ok_or(NotJson)?;
                if !digits.iter().all(u8::is_ascii_hexdigit) {
                    return Err(NotJson);
                }
                self.at += 6;
            }
            _ => return Err(NotJson),
        }
        Ok(())
    }

    /// Goes behind the value that comes, whatever it is, and tells where it stands.
    pub fn skip(&mut self) -> Walked<Range<usize>> {
        let mut nest = Nest::default();
        self.peek()?;
        let start = self.at;
        loop {
            let opened = match self.peek()? {
                b'"' => self.text().map(|_| false)?,
                open @ (b'{' | b'[') => self.open(open, &mut nest)?,
                _ => self.scalar().map(|()| false)?,
            };
            if !opened && self.close(&mut nest)? {
                return Ok(start..self.at);
            }
        }
    }

    /// As [`Cursor::skip`], where nobody asks for the place.
    pub fn pass(&mut self) -> Walked<()> {
        self.skip().map(|_| ())
    }

    /// As [`Cursor::skip`], with the text of the value.
    pub fn value(&mut self) -> Walked<&'a [u8]> {
        self.skip().map(|value| &self.text[value])
    }

    /// Goes into an object or list; false where it is empty and done with.
    fn open(&mut self, open: u8, nest: &mut Nest) -> Walked<bool> {
        self.at += 1;
        let is_object = open == b'{';
        if self.peek()? == closing(is_object) {
            self.at += 1;
            return Ok(false);
        }
        nest.push(is_object)?;
        if is_object {
            self.key()?;
        }
        Ok(true)
    }

    /// Behind a value: goes on to the next one, out of all that ends here. True where nothing is left to go on in.
    fn close(&mut self, nest: &mut Nest) -> Walked<bool> {
        while let Some(is_object) = nest.top() {
            match self.peek()? {
                b',' => {
                    self.at += 1;
                    if is_object {
                        self.key()?;
                    }
                    return Ok(false);
                }
                close if close == closing(is_object) => {
                    self.at += 1;
                    nest.pop();
                }
                _ => return Err(NotJson),
            }
        }
        Ok(true)
    }

    fn scalar(&mut self) -> Walked<()> {
        let rest = &self.text[self.at..];
        let literal: &[u8] = match rest.first() {
            Some(b'n') => b"null",
            Some(b't') => b"true",
            Some(b'f') => b"false",
            _ => {
                self.at += number_bytes(rest).ok_or(NotJson)?;
                return Ok(());
            }
        };
        self.at += literal.len();
        if rest.starts_with(literal) { Ok(()) } else { Err(NotJson) }
    }
}

fn closing(is_object: bool) -> u8 {
    if is_object { b'}' } else { b']' }
}

/// Which of the open things are objects, one bit each.
#[derive(Default)]
struct Nest {
    depth: usize,
    objects: [u64; DEPTH_MAX / 64],
}

impl Nest {
    fn push(&mut self, is_object: bool) -> Walked<()> {
        let word = self.objects.get_mut(self.depth / 64).ok_or(NotJson)?;
        let bit = 1 << (self.depth % 64);
        if is_object {
            *word |= bit
        } else {
            *word &= !bit
        }
        self.depth += 1;
        Ok(())
    }

    fn top(&self) -> Option<bool> {
        let last = self.depth.checked_sub(1)?;
        Some(self.objects[last / 64] >> (last % 64) & 1 == 1)
    }

    fn pop(&mut self) {
        self.depth -= 1;
    }
}

/// How many bytes come before the first quote, backslash or control character; eight of them are looked at at once.
fn plain_bytes(text: &[u8]) -> usize {
    let (words, rest) = text.as_chunks::<8>();
    for (i, word) in words.iter().enumerate() {
        let word = u64::from_le_bytes(*word);
        let zero_in = |w: u64| w.wrapping_sub(ONES) & !w;
        let quote = zero_in(word ^ (ONES * u64::from(b'"')));
        let backslash = zero_in(word ^ (ONES * u64::from(b'\\')));
        let control = word.wrapping_sub(ONES * 0x20) & !word;
        // A borrow reaches only higher bytes, so that the lowest hit is a true one.
        let hits = (quote | backslash | control) & HIGH_BITS;
        if hits != 0 {
            return i * 8 + hits.trailing_zeros() as usize / 8;
        }
    }
    let plain = |byte: &u8| *byte >= 0x20 && *byte != b'"' && *byte != b'\\';
    words.len() * 8 + rest.iter().take_while(|byte| plain(byte)).count()
}

/// The length of the number in front, by JSON's grammar.
fn number_bytes(text: &[u8]) -> Option<usize> {
    let digits = |at: usize| text[at..].iter().take_while(|byte| byte.is_ascii_digit()).count();
    let mut at = usize::from(text.first() == Some(&b'-'));
    let whole = digits(at);
    if whole == 0 || (whole > 1 && text[at] == b'0') {
        return None;
    }
    at += whole;
    if text.get(at) == Some(&b'.') {
        let fraction = digits(at + 1);
        at += 1 + (fraction > 0).then_some(fraction)?;
    }
    if let Some(b'e' | b'E') = text.get(at) {
        at += 1 + usize::from(matches!(text.get(at + 1), Some(b'+' | b'-')));
        let exponent = digits(at);
        at += (exponent > 0).then_some(exponent)?;
    }
    Some(at)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde::de::IgnoredAny;

    fn accepts(text: &[u8]) -> bool {
        let mut cursor = Cursor::new(text);
        cursor.skip().is_ok() && cursor.is_at_end()
    }

    #[test]
    fn takes_what_is_json_and_nothing_else() {
        let good = [
            "0",
            "-0",
            "1.5e-7",
            "10E+2",
            "\"\"",
            "\"a\\u00e9\\n\"",
            "[]",
            "{}",
            " [ 1 , [ ] , { } ] ",
            "{\"a\":{\"b\":[null,true,false]},\"a\":\"\"}",
            "\"eight byt\\\"es and some more\"",
        ];
        let bad = [
            "",
            "01",
            "-",
            "1.",
            "1e",
            ".5",
            "+1",
            "nul",
            "\"",
            "\"\\x\"",
            "\"\\u00g0\"",
            "\"\n\"",
            "[1,]",
            "[,1]",
            "{,}",
            "{\"a\"}",
            "{\"a\":}",
            "{\"a\":1,}",
            "{a:1}",
            "[1 2]",
            "[1}",
            "{\"a\":1]",
            "1 1",
            "\"seven b\u{1}\"",
        ];
        for (texts, expected) in [(&good[..], true), (&bad[..], false)] {
            for text in texts {
                assert_eq!(accepts(text.as_bytes()), expected, "{text}");
                assert_eq!(serde_json::from_str::<IgnoredAny>(text).is_ok(), expected, "serde_json: {text}");
            }
        }
    }

    #[test]
    fn depth_is_limited() {
        let nested = |depth: usize| [vec![b'['; depth], vec![b']'; depth]].concat();
        assert!(accepts(&nested(DEPTH_MAX)) && !accepts(&nested(DEPTH_MAX + 2)));
    }

    #[test]
    fn walks_fields_and_items() {
        let mut cursor = Cursor::new(br#" {"a" : [1, "x\u0041"] , "b\n":{}} "#);
        assert_eq!(cursor.enter(b'['), Ok(false));
        assert_eq!(cursor.enter(b'{'), Ok(true));
        let mut first = true;
        assert_eq!(cursor.field(&mut first).unwrap().unwrap().meant(), "a");
        assert_eq!(cursor.enter(b'['), Ok(true));
        let mut first_item = true;
        assert_eq!((cursor.item(&mut first_item), cursor.skip().map(|s| s.len())), (Ok(true), Ok(1)));
        assert!(cursor.item(&mut first_item).unwrap());
        assert_eq!(cursor.text().unwrap().meant(), "xA");
        assert_eq!(cursor.item(&mut first_item), Ok(false));
        assert_eq!(&*cursor.field(&mut first).unwrap().unwrap().name(), b"b\n");
        cursor.skip().unwrap();
        assert!(cursor.field(&mut first).unwrap().is_none() && cursor.is_at_end());
    }

    proptest! {
        #[test]
        fn agrees_with_serde_json(text in "[\\[\\]{},:\"\\\\/ue0-1.+ntrufalse\\-\u{e9}\u{1} ]{0,24}") {
            prop_assert_eq!(accepts(text.as_bytes()), serde_json::from_str::<IgnoredAny>(&text).is_ok());
        }

        #[test]
        fn finds_the_first_byte_that_is_not_plain(text in prop::collection::vec(any::<u8>(), 0..40)) {
            let plain = |b: &u8| *b >= 0x20 && *b != b'"' && *b != b'\\';
            prop_assert_eq!(plain_bytes(&text), text.iter().take_while(|b| plain(b)).count());
        }
    }
}
