//! Output of others on our terminal: text, line ends, tabs and colours are let through, and nothing that moves a cursor, names a
//! window, fills a clipboard or turns text around.

use belfry_core::display::is_unsafe;

/// Takes out of a stream what a terminal would obey. Pieces may begin and end anywhere.
pub struct Tame {
    colours: bool,
    /// A character whose bytes are not all there yet.
    rest: Vec<u8>,
    inside: Inside,
    /// A colour was set and not taken back.
    coloured: bool,
}

enum Inside {
    Text,
    /// After ESC.
    Escape,
    /// After `ESC [`, with what came since.
    Control(String),
    /// In a string for the terminal, until BEL or `ESC \`.
    ForTerminal {
        escape: bool,
    },
}

/// A longer sequence is no colour.
const SEQUENCE_MAX: usize = 64;

impl Tame {
    pub fn new(colours: bool) -> Tame {
        Tame { colours, rest: Vec::new(), inside: Inside::Text, coloured: false }
    }

    /// What may be shown of a piece.
    pub fn pass(&mut self, bytes: &[u8]) -> String {
        self.rest.extend_from_slice(bytes);
        let mut shown = String::with_capacity(self.rest.len());
        let held = std::mem::take(&mut self.rest);
        let mut held = held.as_slice();
        while !held.is_empty() {
            let (text, wrong) = match std::str::from_utf8(held) {
                Ok(text) => (text, held.len()..held.len()),
                Err(error) => {
                    let valid = error.valid_up_to();
                    let end = error.error_len().map(|wrong| valid + wrong);
                    let text = std::str::from_utf8(&held[..valid]).unwrap_or_default();
                    (text, valid..end.unwrap_or(valid))
                }
            };
            let is_whole = text.len() == held.len();
            text.chars().for_each(|c| self.character(c, &mut shown));
            if is_whole {
                break;
            }
            if wrong.is_empty() {
                self.rest = held[wrong.start..].to_vec();
                break;
            }
            self.character(char::REPLACEMENT_CHARACTER, &mut shown);
            held = &held[wrong.end..];
        }
        shown
    }

    /// What is left at the end: colours go back.
    pub fn end(&mut self) -> &'static str {
        if std::mem::take(&mut self.coloured) { "\x1b[0m" } else { "" }
    }

    fn character(&mut self, c: char, shown: &mut String) {
        self.inside = match std::mem::replace(&mut self.inside, Inside::Text) {
            Inside::Text => match c {
                '\x1b' => Inside::Escape,
                '\n' | '\t' => {
                    shown.push(c);
                    Inside::Text
                }
                // The eight-bit forms of the same.
                '\u{9b}' => Inside::Control(String::new()),
                '\u{90}' | '\u{98}' | '\u{9d}' | '\u{9e}' | '\u{9f}' => Inside::ForTerminal { escape: false },
                c => {
                    if !is_unsafe(c) {
                        shown.push(c);
                    }
                    Inside::Text
                }
            },
            // A line ends every sequence: what was never closed hides nothing that comes after it.
            Inside::Escape | Inside::Control(_) | Inside::ForTerminal { .. } if c == '\n' => {
                shown.push(c);
                Inside::Text
            }
            Inside::Escape => match c {
                '[' => Inside::Control(String::new()),
                ']' | 'P' | 'X' | '^' | '_' => Inside::ForTerminal { escape: false },
                '\x1b' => Inside::Escape,
                // `ESC ( B` and the like take one more.
                ' '..='/' => Inside::Escape,
                _ => Inside::Text,
            },
            Inside::Control(mut sequence) => match c {
                '0'..='?' | ' '..='/' if sequence.len() < SEQUENCE_MAX => {
                    sequence.push(c);
                    Inside::Control(sequence)
                }
                'm' if self.colours && is_colour(&sequence) => {
                    shown.push_str("\x1b[");
                    shown.push_str(&sequence);
                    shown.push('m');
                    self.coloured = !matches!(sequence.as_str(), "" | "0");
                    Inside::Text
                }
                '\x1b' => Inside::Escape,
                _ => Inside::Text,
            },
            Inside::ForTerminal { escape } => match c {
                '\x07' | '\u{9c}' => Inside::Text,
                '\\' if escape => Inside::Text,
                c => Inside::ForTerminal { escape: c == '\x1b' },
            },
        };
    }
}

/// Whether the parameters of a sequence that ends in `m` set colours and the like, and do not hide text (8).
fn is_colour(sequence: &str) -> bool {
    let mut codes = sequence.split([';', ':']);
    while let Some(code) = codes.next() {
        match code {
            "8" => return false,
            // A colour of its own follows: `5;N` or `2;R;G;B`.
            "38" | "48" | "58" => match codes.next() {
                Some("5") => drop(codes.next()),
                Some("2") => drop(codes.nth(2)),
                _ => return false,
            },
            code if code.bytes().all(|digit| digit.is_ascii_digit()) => {}
            _ => return false,
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tame(text: &str) -> String {
        let mut tame = Tame::new(true);
        let shown = tame.pass(text.as_bytes());
        shown + tame.end()
    }

    #[test]
    fn text_and_colours_are_let_through() {
        assert_eq!(tame("a\tb\n\x1b[1;31mred\x1b[0m ä€😀"), "a\tb\n\x1b[1;31mred\x1b[0m ä€😀");
        assert_eq!(tame("\x1b[31mred"), "\x1b[31mred\x1b[0m");
        assert_eq!(Tame::new(false).pass(b"\x1b[31mred\x1b[m"), "red");
    }

    #[test]
    fn nothing_else_is() {
        let hostile = [
            ("\x1b[2J\x1b[Hx", "x"),
            ("\x1b]0;title\x07x", "x"),
            ("\x1b]52;c;aGVsbG8=\x1b\\x", "x"),
            ("\x1bP+q544e\x1b\\x", "x"),
            ("a\rb\x08c\x7f\0", "abc"),
            ("\u{9b}2Jx\u{9d}0;t\u{9c}y", "xy"),
            ("\x1b(Bx\x1bcy", "xy"),
            ("\x1b[?25lx\x1b[>4;1my", "xy"),
            ("a\u{202e}b", "ab"),
            ("\x1b[\x1b[31mx", "\x1b[31mx\x1b[0m"),
            ("\x1b[8mx\x1b[1;8my\x1b[38;5;8mz", "xy\x1b[38;5;8mz\x1b[0m"),
            ("\x1b]0;never ended\nx\x1b[12\ny\x1b\nz", "\nx\ny\nz"),
            ("a\u{200b}b\u{2028}c\u{feff}d\u{e0041}e", "abcde"),
        ];
        for (text, shown) in hostile {
            assert_eq!(tame(text), shown, "{text:?}");
        }
        let endless = format!("\x1b[{}mx", "1;".repeat(10_000));
        assert!(!tame(&endless).contains('\x1b'));
    }

    #[test]
    fn pieces_may_end_anywhere() {
        let text = "ä\x1b[1;31mred€\x1b]0;title\x07\x1b[0m😀\n";
        let whole = tame(text);
        for cut in 0..text.len() {
            let mut tame = Tame::new(true);
            let mut shown = tame.pass(&text.as_bytes()[..cut]);
            shown += &tame.pass(&text.as_bytes()[cut..]);
            assert_eq!(shown + tame.end(), whole, "{cut}");
        }
        assert_eq!(Tame::new(true).pass(b"a\xffb\xc3"), "a\u{fffd}b");
    }
}
