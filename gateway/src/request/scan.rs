//! One pass over a body: where its known fields stand, and how many prompts a list of them holds. *Pure.*

use std::ops::Range;

use crate::json::{Cursor, NotJson};
use crate::request::fields::Field;

/// Where one known field stands.
#[derive(Clone, Debug)]
pub struct Entry {
    pub field: Field,
    /// The end of the field before it, or of the opening brace.
    pub before: usize,
    pub value: Range<usize>,
}

/// What a value of `prompt`, `text` or `input_ids` is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Prompts {
    /// A string, one list of token ids, or something that the worker will refuse.
    One,
    None,
    Many(u64),
}

/// The anatomy of a body.
#[derive(Clone, Debug)]
pub struct Anatomy {
    /// Right behind the opening brace.
    pub inside: usize,
    /// All fields, the unknown ones included.
    pub fields: usize,
    /// The known ones in the order of the body, duplicates kept.
    pub known: Vec<Entry>,
    /// Of the last `prompt`, `text` and `input_ids`.
    pub prompts: [Option<Prompts>; 3],
}

/// Walks the body once.
pub fn anatomy(body: &[u8]) -> Result<Anatomy, NotJson> {
    let mut cursor = Cursor::new(body);
    if !cursor.enter(b'{')? {
        return Err(NotJson);
    }
    let mut found = Anatomy { inside: cursor.position(), fields: 0, known: Vec::with_capacity(8), prompts: [None; 3] };
    let (mut first, mut before) = (true, found.inside);
    while let Some(name) = cursor.field(&mut first)? {
        let field = Field::of_name(&name.name());
        let slot = field.and_then(prompt_slot);
        let value = match slot {
            Some(slot) => {
                let (value, prompts) = prompts(&mut cursor)?;
                found.prompts[slot] = Some(prompts);
                value
            }
            None => cursor.skip()?,
        };
        let end = value.end;
        if let Some(field) = field {
            found.known.push(Entry { field, before, value });
        }
        found.fields += 1;
        before = end;
    }
    if cursor.is_at_end() { Ok(found) } else { Err(NotJson) }
}

/// The place of a field of prompts in [`Anatomy::prompts`].
pub fn prompt_slot(field: Field) -> Option<usize> {
    match field {
        Field::Prompt => Some(0),
        Field::Text => Some(1),
        Field::InputIds => Some(2),
        _ => None,
    }
}

/// Skips a value and counts the prompts in it on the way.
fn prompts(cursor: &mut Cursor) -> Result<(Range<usize>, Prompts), NotJson> {
    cursor.peek()?;
    let start = cursor.position();
    if !cursor.enter(b'[')? {
        return Ok((cursor.skip()?, Prompts::One));
    }
    let mut first = true;
    let (mut items, mut are_prompts) = (0, false);
    while cursor.item(&mut first)? {
        if items == 0 {
            are_prompts = matches!(cursor.peek()?, b'"' | b'[');
        }
        cursor.skip()?;
        items += 1;
    }
    let prompts = match (items, are_prompts) {
        (0, _) => Prompts::None,
        (_, true) => Prompts::Many(items),
        (_, false) => Prompts::One,
    };
    Ok((start..cursor.position(), prompts))
}
