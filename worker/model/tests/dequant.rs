//! Each quantised format against `gguf`'s own `dequantize`, bit for bit, on random blocks.

use serde_json::Value;
use tandem_model::{dequant::dequantize_row, weights::DType};

#[test]
fn every_format_equals_the_reference_to_the_bit() {
    let reference: Value = serde_json::from_str(include_str!("data/dequant.json")).unwrap();
    let types = [
        ("BF16", DType::BF16),
        ("Q8_0", DType::Q8_0),
        ("Q4_0", DType::Q4_0),
        ("Q4_1", DType::Q4_1),
        ("Q5_0", DType::Q5_0),
        ("Q5_1", DType::Q5_1),
        ("Q4_K", DType::Q4K),
        ("Q5_K", DType::Q5K),
        ("Q6_K", DType::Q6K),
    ];
    for (name, dtype) in types {
        let hex = reference[name]["bytes"].as_str().unwrap();
        let row: Vec<u8> =
            (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect();
        let expected: Vec<u32> =
            reference[name]["bits"].as_array().unwrap().iter().map(|bits| bits.as_u64().unwrap() as u32).collect();
        let mut out = vec![0.0; expected.len()];
        dequantize_row(dtype, &row, &mut out);
        let bits: Vec<u32> = out.iter().map(|value| value.to_bits()).collect();
        assert_eq!(bits, expected, "{name}");
    }
}

#[test]
fn plain_types_are_read_without_alignment() {
    let bytes = [0u8, 0, 0, 0x80, 0x3F, 0, 0, 0x20, 0xC1];
    let mut out = [0.0; 2];
    dequantize_row(DType::F32, &bytes[1..], &mut out);
    assert_eq!(out, [1.0, -10.0]);
    dequantize_row(DType::F16, &[0x00, 0x3C, 0x00, 0xC0], &mut out);
    assert_eq!(out, [1.0, -2.0]);
}
