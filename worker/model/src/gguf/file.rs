//! The GGUF container, versions 2 and 3: metadata and where each tensor lies. *Pure.*
//!
//! The bytes are not trusted: each length is checked against what is left of the file before anything is allocated,
//! values are counted against [`VALUES_MAX`], and nesting is bounded. An error names the byte at fault.

use std::{collections::HashMap, ops::Range};

use crate::weights::DType;

/// Values of all metadata together; the largest vocabularies need a million.
const VALUES_MAX: usize = 1 << 22;
const TENSORS_MAX: u64 = 1 << 17;
const KEYS_MAX: u64 = 1 << 16;
const KEY_BYTES_MAX: usize = 1 << 16;
const NESTING_MAX: usize = 4;
const DIMENSIONS_MAX: u32 = 4;
const ALIGNMENT_DEFAULT: u64 = 32;
const ALIGNMENT_MAX: u64 = 1 << 20;

#[derive(Debug)]
pub(super) struct GgufFile<'a> {
    metadata: HashMap<&'a str, Value<'a>>,
    tensors: HashMap<&'a str, TensorInfo>,
}

#[derive(Clone, PartialEq, Debug)]
pub(super) enum Value<'a> {
    Integer(i128),
    Float(f64),
    Bool(bool),
    /// Text is not always UTF-8 in the wild; whoever reads it decides.
    Text(&'a [u8]),
    Array(Vec<Value<'a>>),
}

#[derive(Clone, Debug)]
pub(super) struct TensorInfo {
    /// Row-major: the last of GGUF's dimensions first. A vector has one row.
    pub rows: usize,
    pub cols: usize,
    pub dtype: DType,
    /// Bytes of the file.
    pub range: Range<usize>,
}

impl<'a> GgufFile<'a> {
    pub fn parse(bytes: &'a [u8]) -> Result<Self, String> {
        let mut reader = Reader { bytes, at: 0, values: 0 };
        if reader.take(4, "the magic number")? != b"GGUF" {
            return Err("it does not begin with GGUF".into());
        }
        match reader.u32("the version")? {
            2 | 3 => {}
            version if matches!(version.swap_bytes(), 1..=3) => return Err("it is a big-endian GGUF file".into()),
            version => return Err(format!("GGUF version {version} is unsupported (supported: 2, 3)")),
        }
        let tensors = reader.count("tensors", TENSORS_MAX)?;
        let keys = reader.count("metadata keys", KEYS_MAX)?;
        let mut metadata = HashMap::new();
        for _ in 0..keys {
            let key = reader.key("a metadata key")?;
            let value = reader.value(0).map_err(|what| format!("metadata {key}: {what}"))?;
            if metadata.insert(key, value).is_some() {
                return Err(format!("metadata {key} appears twice"));
            }
        }
        let mut file = Self { metadata, tensors: HashMap::new() };
        let raw = (0..tensors).map(|_| RawTensor::read(&mut reader)).collect::<Result<Vec<_>, _>>()?;
        let alignment = file.alignment()?;
        let data = (reader.at as u64).next_multiple_of(alignment);
        for tensor in raw {
            let info = tensor.place(bytes.len() as u64, data, alignment).map_err(|what| tensor.fault(&what))?;
            if file.tensors.insert(tensor.name, info).is_some() {
                return Err(tensor.fault("it appears twice"));
            }
        }
        Ok(file)
    }

    fn alignment(&self) -> Result<u64, String> {
        let alignment = self.integer("general.alignment")?.unwrap_or(ALIGNMENT_DEFAULT);
        if alignment.is_power_of_two() && alignment <= ALIGNMENT_MAX {
            Ok(alignment)
        } else {
            Err(format!("general.alignment is {alignment}, no power of two up to {ALIGNMENT_MAX}"))
        }
    }

    pub fn get(&self, key: &str) -> Option<&Value<'a>> {
        self.metadata.get(key)
    }

    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(name)
    }

    pub fn integer(&self, key: &str) -> Result<Option<u64>, String> {
        let wrong = || format!("metadata {key} is no unsigned integer");
        match self.get(key) {
            None => Ok(None),
            Some(Value::Integer(value)) => u64::try_from(*value).map(Some).map_err(|_| wrong()),
            Some(_) => Err(wrong()),
        }
    }

    pub fn number(&self, key: &str) -> Result<Option<f64>, String> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Float(value)) if value.is_finite() => Ok(Some(*value)),
            Some(Value::Integer(value)) => Ok(Some(*value as f64)),
            Some(_) => Err(format!("metadata {key} is no finite number")),
        }
    }

    pub fn flag(&self, key: &str) -> Result<Option<bool>, String> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(*value)),
            Some(_) => Err(format!("metadata {key} is no boolean")),
        }
    }

    pub fn text(&self, key: &str) -> Result<Option<&'a str>, String> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Text(text)) => {
                std::str::from_utf8(text).map(Some).map_err(|_| format!("metadata {key} is not UTF-8"))
            }
            Some(_) => Err(format!("metadata {key} is no text")),
        }
    }

    pub fn array(&self, key: &str) -> Result<Option<&[Value<'a>]>, String> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Array(items)) => Ok(Some(items)),
            Some(_) => Err(format!("metadata {key} is no array")),
        }
    }

    /// An array of texts; `what` counts one bad entry by its index.
    pub fn texts(&self, key: &str) -> Result<Option<Vec<&'a str>>, String> {
        let Some(items) = self.array(key)? else { return Ok(None) };
        let text = |(index, item): (usize, &Value<'a>)| match item {
            Value::Text(text) => std::str::from_utf8(text).map_err(|_| format!("{key}[{index}] is not UTF-8")),
            _ => Err(format!("{key}[{index}] is no text")),
        };
        items.iter().enumerate().map(text).collect::<Result<_, _>>().map(Some)
    }
}

struct RawTensor<'a> {
    name: &'a str,
    dimensions: Vec<u64>,
    type_id: u32,
    offset: u64,
}

impl<'a> RawTensor<'a> {
    fn read(reader: &mut Reader<'a>) -> Result<Self, String> {
        let name = reader.key("a tensor name")?;
        let count = reader.u32("the number of dimensions")?;
        if count == 0 || count > DIMENSIONS_MAX {
            return Err(format!("tensor {name}: {count} dimensions; 1 to {DIMENSIONS_MAX} are possible"));
        }
        let dimensions = (0..count).map(|_| reader.u64("a dimension")).collect::<Result<_, _>>()?;
        Ok(Self { name, dimensions, type_id: reader.u32("a tensor type")?, offset: reader.u64("an offset")? })
    }

    fn fault(&self, what: &str) -> String {
        format!("tensor {}: {what}", self.name)
    }

    fn place(&self, file_bytes: u64, data: u64, alignment: u64) -> Result<TensorInfo, String> {
        let dtype = dtype(self.type_id)?;
        let (block, block_bytes) = dtype.block();
        let cols = self.dimensions[0];
        let absurd = || format!("dimensions {:?} are beyond any file", self.dimensions);
        let rows =
            self.dimensions[1..].iter().try_fold(1u64, |rows, size| rows.checked_mul(*size)).ok_or_else(absurd)?;
        if rows == 0 || cols == 0 {
            return Err(format!("dimensions {:?} hold nothing", self.dimensions));
        }
        if !cols.is_multiple_of(block as u64) {
            return Err(format!("rows of {cols} elements are no whole number of {dtype:?} blocks of {block}"));
        }
        let bytes = (cols / block as u64)
            .checked_mul(block_bytes as u64)
            .and_then(|row| row.checked_mul(rows))
            .ok_or_else(absurd)?;
        if !self.offset.is_multiple_of(alignment) {
            return Err(format!("offset {} is not aligned to {alignment}", self.offset));
        }
        let start = data.checked_add(self.offset);
        let end = start.and_then(|start| start.checked_add(bytes));
        match (start, end) {
            (Some(start), Some(end)) if end <= file_bytes => {
                Ok(TensorInfo { rows: rows as usize, cols: cols as usize, dtype, range: start as usize..end as usize })
            }
            _ => Err(format!(
                "{bytes} bytes at offset {} reach beyond the file's {file_bytes} bytes: it is truncated or damaged",
                self.offset
            )),
        }
    }
}

/// GGML's type numbers. Names of the unsupported ones serve the error only.
fn dtype(id: u32) -> Result<DType, String> {
    let name = match id {
        0 => return Ok(DType::F32),
        1 => return Ok(DType::F16),
        2 => return Ok(DType::Q4_0),
        3 => return Ok(DType::Q4_1),
        6 => return Ok(DType::Q5_0),
        7 => return Ok(DType::Q5_1),
        8 => return Ok(DType::Q8_0),
        12 => return Ok(DType::Q4K),
        13 => return Ok(DType::Q5K),
        14 => return Ok(DType::Q6K),
        30 => return Ok(DType::BF16),
        9 => "Q8_1",
        10 => "Q2_K",
        11 => "Q3_K",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        20 => "IQ4_NL",
        21 => "IQ3_S",
        22 => "IQ2_S",
        23 => "IQ4_XS",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        29 => "IQ1_M",
        34 => "TQ1_0",
        35 => "TQ2_0",
        39 => "MXFP4",
        _ => "unknown",
    };
    Err(format!(
        "unsupported type {id} ({name}) (supported: F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K)"
    ))
}

/// Reads forward; every step is checked against the end of the file.
struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
    values: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize, what: &str) -> Result<&'a [u8], String> {
        let left = self.bytes.len() - self.at;
        if count > left {
            let at = self.at;
            return Err(format!("{what} at byte {at} needs {count} bytes, {left} are left: the file is truncated"));
        }
        self.at += count;
        Ok(&self.bytes[self.at - count..self.at])
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], String> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N, what)?);
        Ok(out)
    }

    fn u32(&mut self, what: &str) -> Result<u32, String> {
        self.array(what).map(u32::from_le_bytes)
    }

    fn u64(&mut self, what: &str) -> Result<u64, String> {
        self.array(what).map(u64::from_le_bytes)
    }

    fn count(&mut self, what: &str, max: u64) -> Result<u64, String> {
        let count = self.u64(what)?;
        if count > max { Err(format!("{count} {what}; this server accepts {max}")) } else { Ok(count) }
    }

    fn text(&mut self, what: &str) -> Result<&'a [u8], String> {
        let length = self.u64(what)?;
        self.take(usize::try_from(length).unwrap_or(usize::MAX), what)
    }

    fn key(&mut self, what: &str) -> Result<&'a str, String> {
        let at = self.at;
        let key = self.text(what)?;
        let key = std::str::from_utf8(key).map_err(|_| format!("{what} at byte {at} is not UTF-8"))?;
        if key.len() > KEY_BYTES_MAX {
            return Err(format!("{what} at byte {at} is {} bytes long", key.len()));
        }
        Ok(key)
    }

    fn value(&mut self, depth: usize) -> Result<Value<'a>, String> {
        let kind = self.u32("a value type")?;
        self.value_of(kind, depth)
    }

    fn value_of(&mut self, kind: u32, depth: usize) -> Result<Value<'a>, String> {
        self.values += 1;
        if self.values > VALUES_MAX {
            return Err(format!("more than {VALUES_MAX} values"));
        }
        let what = "a value";
        Ok(match kind {
            0 => Value::Integer(u8::from_le_bytes(self.array(what)?).into()),
            1 => Value::Integer(i8::from_le_bytes(self.array(what)?).into()),
            2 => Value::Integer(u16::from_le_bytes(self.array(what)?).into()),
            3 => Value::Integer(i16::from_le_bytes(self.array(what)?).into()),
            4 => Value::Integer(self.u32(what)?.into()),
            5 => Value::Integer(i32::from_le_bytes(self.array(what)?).into()),
            6 => Value::Float(f32::from_le_bytes(self.array(what)?).into()),
            7 => Value::Bool(self.array::<1>(what)? != [0]),
            8 => Value::Text(self.text("a text")?),
            9 => {
                if depth >= NESTING_MAX {
                    return Err(format!("arrays nested deeper than {NESTING_MAX}"));
                }
                let kind = self.u32("an array's type")?;
                let count = self.count("array items", VALUES_MAX as u64)?;
                // Grown as items arrive, so that a count alone allocates nothing.
                let mut items = Vec::new();
                for _ in 0..count {
                    items.push(self.value_of(kind, depth + 1)?);
                }
                Value::Array(items)
            }
            10 => Value::Integer(self.u64(what)?.into()),
            11 => Value::Integer(i64::from_le_bytes(self.array(what)?).into()),
            12 => Value::Float(f64::from_le_bytes(self.array(what)?)),
            other => return Err(format!("unknown value type {other}")),
        })
    }
}
