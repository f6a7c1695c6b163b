//! Chat templates, rendered as `transformers` renders them: Jinja with Python's methods, `tojson` as `json.dumps`
//! writes, `raise_exception`, `strftime_now`, loop controls, trimmed blocks. The clock is read by `strftime_now` only.

use minijinja::{Environment, Error, ErrorKind, Value, value::Kwargs, value::ValueKind};
use serde::Serialize;

/// Messages to render. Values come from anything that serializes ([`Value::from_serialize`]) or straight from JSON
/// (`Value` implements `Deserialize`), which keeps the order of keys, and so the text of a tool's description.
#[derive(Clone, Debug, Default)]
pub struct ChatInput {
    /// A list of objects with `role`, `content` and whatever else the template reads.
    pub messages: Value,
    pub tools: Option<Value>,
    /// End the text where the assistant's answer begins.
    pub add_generation_prompt: bool,
    /// Further variables (`chat_template_kwargs`, `documents`); they come last and win.
    pub extra: Vec<(String, Value)>,
}

/// `bos_token`, `eos_token` and their like: names and texts that templates may use.
pub type SpecialTokens = Vec<(String, String)>;

pub(super) struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
}

const NAME: &str = "chat";

impl ChatTemplate {
    pub fn compile(source: String) -> Result<Self, String> {
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_formatter(format_as_python);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_filter("tojson", to_json);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        let statements = without_generation_marks(&source);
        environment.add_template_owned(NAME, statements).map_err(|error| one_line(&error))?;
        Ok(Self { environment, source })
    }

    pub fn source(&self) -> &str {
        &self.source
    }

    pub fn render(&self, input: &ChatInput, special_tokens: &SpecialTokens) -> Result<String, String> {
        let fixed = [
            ("messages".to_owned(), input.messages.clone()),
            ("tools".to_owned(), input.tools.clone().unwrap_or(Value::from(()))),
            ("documents".to_owned(), Value::from(())),
            ("add_generation_prompt".to_owned(), Value::from(input.add_generation_prompt)),
        ];
        let special = special_tokens.iter().map(|(name, text)| (name.clone(), Value::from(text.clone())));
        let context: Value = special.chain(fixed).chain(input.extra.iter().cloned()).collect();
        let template = self.environment.get_template(NAME).map_err(|error| one_line(&error))?;
        template.render(context).map_err(|error| one_line(&error))
    }
}

/// The innermost cause says what is wrong; a template's own refusal is its text alone.
fn one_line(error: &Error) -> String {
    let detail = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    if let Some(message) = detail.strip_prefix(RAISED) {
        return message.to_owned();
    }
    match error.line() {
        Some(line) => format!("{detail} (line {line} of the template)"),
        None => detail,
    }
}

/// Marks a message of `raise_exception`, which is shown without a place in the template.
const RAISED: &str = "\u{1}";

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, format!("{RAISED}{message}")))
}

/// Local time, as Python's `datetime.now().strftime(format)`.
fn strftime_now(format: &str) -> Result<String, Error> {
    use std::fmt::Write;
    let mut text = String::new();
    write!(text, "{}", chrono::Local::now().format(format))
        .map_err(|_| Error::new(ErrorKind::InvalidOperation, format!("unknown time format {format:?}")))?;
    Ok(text)
}

/// `{% generation %}` only marks, in training, which tokens the assistant wrote. It becomes a block that is always
/// taken, with the same trimming signs.
fn without_generation_marks(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let Some(length) = rest[start..].find("%}") else { break };
        let inner = &rest[start + 2..start + length];
        let word = inner.trim_matches(|c: char| c == '-' || c == '+' || c.is_whitespace());
        out.push_str(&rest[..start + 2]);
        match word {
            "generation" => out.push_str(&inner.replace(word, "if true")),
            "endgeneration" => out.push_str(&inner.replace(word, "endif")),
            _ => out.push_str(inner),
        }
        out.push_str("%}");
        rest = &rest[start + length + 2..];
    }
    out.push_str(rest);
    out
}

/// Prints values as Python's `str` does: `True`, `None`, and lists and dicts with their elements' `repr`.
fn format_as_python(out: &mut minijinja::Output, _: &minijinja::State, value: &Value) -> Result<(), Error> {
    let text = match value.kind() {
        ValueKind::Undefined => return Ok(()),
        ValueKind::Bool | ValueKind::None | ValueKind::Seq | ValueKind::Map => python_repr(value),
        _ => return write!(out, "{value}").map_err(Error::from),
    };
    out.write_str(&text).map_err(Error::from)
}

fn python_repr(value: &Value) -> String {
    match value.kind() {
        ValueKind::Bool => if value.is_true() { "True" } else { "False" }.to_owned(),
        ValueKind::None | ValueKind::Undefined => "None".to_owned(),
        ValueKind::String => python_string(value.as_str().unwrap_or_default()),
        ValueKind::Seq => {
            let items: Vec<String> = value.try_iter().into_iter().flatten().map(|item| python_repr(&item)).collect();
            format!("[{}]", items.join(", "))
        }
        ValueKind::Map => {
            let items = value.try_iter().into_iter().flatten().map(|key| {
                let item = value.get_item(&key).unwrap_or_default();
                format!("{}: {}", python_repr(&key), python_repr(&item))
            });
            format!("{{{}}}", items.collect::<Vec<_>>().join(", "))
        }
        _ => value.to_string(),
    }
}

fn python_string(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut out = String::from(quote);
    for character in text.chars() {
        match character {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => out.extend(['\\', c]),
            c => out.push(c),
        }
    }
    out.push(quote);
    out
}

/// `json.dumps(value, ensure_ascii=False, indent=indent)`: no escapes for HTML, `", "` and `": "` between items.
fn to_json(value: &Value, kwargs: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = kwargs.get("indent")?;
    let _ensure_ascii: Option<bool> = kwargs.get("ensure_ascii")?;
    kwargs.assert_all_used()?;
    let mut out = Vec::new();
    let written = match indent {
        Some(indent) => {
            let spaces = " ".repeat(indent.min(INDENT_SPACES_MAX));
            let formatter = serde_json::ser::PrettyFormatter::with_indent(spaces.as_bytes());
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut out, formatter))
        }
        None => value.serialize(&mut serde_json::Serializer::with_formatter(&mut out, Spaced)),
    };
    let fault = |what: String| Error::new(ErrorKind::InvalidOperation, format!("tojson: {what}"));
    written.map_err(|error| fault(error.to_string()))?;
    let text = String::from_utf8(out).map_err(|error| fault(error.to_string()))?;
    Ok(Value::from_safe_string(text))
}

const INDENT_SPACES_MAX: usize = 16;

/// Python's default separators.
struct Spaced;

impl serde_json::ser::Formatter for Spaced {
    fn begin_array_value<W: ?Sized + std::io::Write>(&mut self, out: &mut W, first: bool) -> std::io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(&mut self, out: &mut W, first: bool) -> std::io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(&mut self, out: &mut W) -> std::io::Result<()> {
        out.write_all(b": ")
    }
}
