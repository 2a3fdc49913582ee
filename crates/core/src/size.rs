//! Sizes in bytes, as people write them.

const SIZES: [(&str, u64); 8] = [
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("kB", 1_000),
    ("KB", 1_000),
    ("B", 1),
];

/// A size in bytes: `64KiB`, `1MB`, `65536`; from 1 KiB to 1 GiB.
pub fn parse_size(text: &str) -> Option<u64> {
    let text = text.trim();
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let unit = unit.trim_start();
    let factor =
        if unit.is_empty() { 1 } else { SIZES.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit))?.1 };
    let bytes = number.parse::<u64>().ok()?.checked_mul(factor)?;
    (1 << 10..=1 << 30).contains(&bytes).then_some(bytes)
}

/// A size as [`parse_size`] reads it.
pub fn format_size(bytes: u64) -> String {
    match SIZES[..3].iter().find(|(_, factor)| bytes >= *factor && bytes.is_multiple_of(*factor)) {
        Some((unit, factor)) => format!("{}{unit}", bytes / factor),
        None => bytes.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_and_written() {
        for (text, bytes) in [("1MiB", 1 << 20), ("64 kib", 65_536), ("2048", 2048), ("1MB", 1_000_000)] {
            assert_eq!(parse_size(text), Some(bytes), "{text}");
            assert_eq!(parse_size(&format_size(bytes)), Some(bytes));
        }
        for text in ["", "MiB", "1.5MiB", "-1", "0", "1TiB", "99999999999999999999", "2GiB"] {
            assert_eq!(parse_size(text), None, "{text}");
        }
    }
}
