//! Which characters of a text are what they seem when it is shown.

/// Whether a character does something else than being seen: control characters, line separators, and format characters
/// that turn text around or hide it. The joiners U+200C and U+200D are not among them: scripts and emoji need them.
pub fn is_unsafe(c: char) -> bool {
    c.is_control()
        || matches!(c,
            '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_terminal_obeys_or_does_not_show_is_unsafe() {
        let unsafe_ones = "\0\x07\x08\t\n\r\x1b\x7f\u{80}\u{85}\u{90}\u{9b}\u{9f}\u{200b}\u{200e}\u{200f}\u{61c}\u{202a}\u{202e}\u{2066}\u{2069}\u{2028}\u{2029}\u{feff}\u{ad}\u{e0041}";
        assert!(unsafe_ones.chars().all(is_unsafe));
        assert!(!"aZ 0~é€中שלוم😀👩\u{200d}💻می\u{200c}خ".chars().any(is_unsafe));
    }
}
