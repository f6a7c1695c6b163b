//! Damaged files, by thousands: whatever bytes are changed, cut or repeated, loading ends with a model or an error,
//! never with a panic. A case that once failed stays in `proptest-regressions`.

mod common;

use std::{fs, path::Path, sync::LazyLock};

use common::{GOLDEN, gguf_of};
use proptest::prelude::*;
use tandem_model::{LoadOptions, load};

static GGUF: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let directory = format!("{GOLDEN}/llama-gqa");
    let model = load(&directory, &LoadOptions::default()).unwrap();
    gguf_of(&model, Path::new(&directory))
});

static SAFETENSORS: LazyLock<Vec<u8>> =
    LazyLock::new(|| fs::read(format!("{GOLDEN}/llama-gqa/model.safetensors")).unwrap());

/// Headers are where the structure is: most changes fall there.
const HEADER_BYTES: usize = 16 << 10;

#[derive(Clone, Debug)]
enum Damage {
    Byte {
        at: usize,
        value: u8,
    },
    /// Eight bytes at once: counts, lengths, offsets.
    Number {
        at: usize,
        value: u64,
    },
    Cut {
        at: usize,
    },
    Repeat {
        from: usize,
        to: usize,
        bytes: usize,
    },
}

fn damage() -> impl Strategy<Value = Damage> {
    let place = || prop_oneof![4 => 0..HEADER_BYTES, 1 => 0..400_000usize, 2 => 0..512usize];
    let number = prop_oneof![
        any::<u64>(),
        0..1024u64,
        Just(u64::MAX),
        Just(u64::MAX / 2),
        Just(i64::MIN as u64),
        Just(1 << 32),
        Just((1 << 32) - 1),
    ];
    prop_oneof![
        4 => (place(), any::<u8>()).prop_map(|(at, value)| Damage::Byte { at, value }),
        3 => (place(), number).prop_map(|(at, value)| Damage::Number { at, value }),
        1 => place().prop_map(|at| Damage::Cut { at }),
        1 => (place(), place(), 1..64usize).prop_map(|(from, to, bytes)| Damage::Repeat { from, to, bytes }),
    ]
}

fn apply(bytes: &mut Vec<u8>, damage: &Damage) {
    let put = |bytes: &mut Vec<u8>, at: usize, new: &[u8]| {
        for (offset, value) in new.iter().enumerate() {
            if let Some(byte) = bytes.get_mut(at + offset) {
                *byte = *value;
            }
        }
    };
    match damage {
        Damage::Byte { at, value } => put(bytes, *at, &[*value]),
        Damage::Number { at, value } => put(bytes, *at, &value.to_le_bytes()),
        Damage::Cut { at } => bytes.truncate(*at),
        Damage::Repeat { from, to, bytes: count } => {
            let end = (from + count).min(bytes.len());
            let copy = bytes.get(*from..end).unwrap_or_default().to_vec();
            put(bytes, *to, &copy);
        }
    }
}

fn damaged(bytes: &[u8], damages: &[Damage]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    damages.iter().for_each(|damage| apply(&mut bytes, damage));
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    #[test]
    fn a_damaged_gguf_file_is_loaded_or_refused(damages in prop::collection::vec(damage(), 1..4)) {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), damaged(&GGUF, &damages)).unwrap();
        if let Err(error) = load(file.path().to_str().unwrap(), &LoadOptions::default()) {
            prop_assert!(!error.to_string().is_empty());
        }
    }

    #[test]
    fn a_damaged_safetensors_file_is_loaded_or_refused(damages in prop::collection::vec(damage(), 1..4)) {
        let directory = tempfile::tempdir().unwrap();
        for name in ["config.json", "tokenizer.json"] {
            fs::copy(Path::new(GOLDEN).join("llama-gqa").join(name), directory.path().join(name)).unwrap();
        }
        fs::write(directory.path().join("model.safetensors"), damaged(&SAFETENSORS, &damages)).unwrap();
        if let Err(error) = load(directory.path().to_str().unwrap(), &LoadOptions::default()) {
            prop_assert!(!error.to_string().is_empty());
        }
    }
}
