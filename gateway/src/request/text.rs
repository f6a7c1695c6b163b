//! The prompt of a request as one text, so that prompts which begin alike have texts that begin alike: the whole
//! conversation with its roles, tools first, as chat templates render them. What is no text (images, tool calls, token ids)
//! stands there as its JSON. *Pure.*

use std::borrow::Cow;

use crate::json::{Cursor, NotJson};
use crate::request::{Endpoint, Field, Scanned};

/// Turns, their content, its parts; what lies deeper is no text of a conversation.
const DEPTH_MAX: u32 = 4;

/// The routing text.
pub fn of(scanned: &Scanned) -> Cow<'_, str> {
    match scanned.endpoint {
        Endpoint::Generate => first_of(scanned, &[Field::Text, Field::InputIds]),
        Endpoint::Completions => first_of(scanned, &[Field::Prompt]),
        Endpoint::Chat => conversation(scanned, &[Field::Tools], Field::Messages),
        Endpoint::Messages => conversation(scanned, &[Field::Tools, Field::System], Field::Messages),
        Endpoint::Responses => conversation(scanned, &[Field::Tools, Field::Instructions], Field::Input),
        Endpoint::Embeddings | Endpoint::Rerank | Endpoint::Classify | Endpoint::Score => {
            first_of(scanned, &[Field::Input, Field::Text])
        }
    }
}

/// A string as it is meant, anything else as its JSON; of a list without the closing bracket, so that a longer list
/// continues a shorter one.
fn first_of<'a>(scanned: &'a Scanned, fields: &[Field]) -> Cow<'a, str> {
    let Some(raw) = fields.iter().find_map(|field| scanned.raw(*field)) else { return Cow::Borrowed("") };
    match Cursor::new(raw.as_bytes()).text() {
        Ok(text) => text.meant(),
        Err(NotJson) => Cow::Borrowed(raw.strip_suffix(']').unwrap_or(raw)),
    }
}

fn conversation<'a>(scanned: &'a Scanned, heads: &[Field], turns: Field) -> Cow<'a, str> {
    let raws = heads.iter().chain([&turns]).filter_map(|field| scanned.raw(*field));
    let mut out = String::with_capacity(raws.clone().map(str::len).sum());
    for raw in raws {
        let mut cursor = Cursor::new(raw.as_bytes());
        // The text was walked already, so that it cannot turn out to be no JSON.
        let _ = render(&mut cursor, raw, 0, &mut out);
        out.push('\n');
    }
    Cow::Owned(out)
}

/// A string, a list of turns or parts, or one of them.
fn render(cursor: &mut Cursor, raw: &str, depth: u32, out: &mut String) -> Result<(), NotJson> {
    match cursor.peek()? {
        _ if depth > DEPTH_MAX => out.push_str(&raw[cursor.skip()?]),
        b'"' => out.push_str(&cursor.text()?.meant()),
        b'[' => {
            cursor.enter(b'[')?;
            let mut first = true;
            while cursor.item(&mut first)? {
                render(cursor, raw, depth + 1, out)?;
                out.push('\n');
            }
        }
        b'{' => turn(cursor, raw, depth, out)?,
        _ => out.push_str(&raw[cursor.skip()?]),
    }
    Ok(())
}

/// The role comes first, whatever the order in the body; then the texts, then the JSON of the rest.
fn turn(cursor: &mut Cursor, raw: &str, depth: u32, out: &mut String) -> Result<(), NotJson> {
    let start = cursor.clone();
    for wanted in [Part::Role, Part::Said, Part::Other] {
        *cursor = start.clone();
        cursor.enter(b'{')?;
        let mut first = true;
        while let Some(name) = cursor.field(&mut first)? {
            let part = Part::of(&name.name());
            if part != wanted {
                cursor.skip()?;
            } else if part == Part::Other {
                out.push_str(&raw[cursor.skip()?]);
            } else {
                render(cursor, raw, depth + 1, out)?;
                out.push(' ');
            }
        }
    }
    Ok(())
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    Role,
    Said,
    Other,
    /// Tells the kind of a part, which its text does already.
    Kind,
}

impl Part {
    fn of(name: &[u8]) -> Self {
        match name {
            b"role" => Part::Role,
            b"content" | b"text" => Part::Said,
            b"type" => Part::Kind,
            _ => Part::Other,
        }
    }
}
