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
                'm' => {
                    let kept = if self.colours { colours(&sequence) } else { Vec::new() };
                    if let Some(last) = kept.last() {
                        self.coloured = last != "0";
                        shown.push_str(&format!("\x1b[{}m", kept.join(";")));
                    }
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

/// The parameters of a sequence that ends in `m` that set colours and styles, each written in one way only. Concealed text
/// (8), the colour of underlines (58, whose numbers some terminals take for parameters) and what is unknown is left out.
fn colours(sequence: &str) -> Vec<String> {
    // Others begin with a mark, such as `?` or `>`, and mean something else.
    if !sequence.bytes().all(|byte| byte.is_ascii_digit() || b";:".contains(&byte)) {
        return Vec::new();
    }
    let mut kept = Vec::new();
    let mut parameters = sequence.split(';');
    while let Some(parameter) = parameters.next() {
        let numbers: Vec<u16> = parameter.split(':').map(|part| number(part).unwrap_or(u16::MAX)).collect();
        match numbers.as_slice() {
            // The colour follows as parameters. Terminals differ in what they make of an incomplete one, and of the rest.
            [code @ (38 | 48 | 58)] => {
                let mut next = || parameters.next().and_then(number);
                let colour = match next() {
                    Some(5) => next().map(|index| vec![5, index]),
                    Some(2) => {
                        next().zip(next()).zip(next()).map(|((red, green), blue)| vec![2, red, green, blue])
                    }
                    _ => None,
                };
                let Some(colour) = colour else { break };
                kept.extend(colour_of(*code, &colour));
            }
            [code @ (38 | 48), 2, _, rgb @ ..] if rgb.len() >= 3 => {
                kept.extend(colour_of(*code, &[2, rgb[0], rgb[1], rgb[2]]));
            }
            [code @ (38 | 48), colour @ ..] => kept.extend(colour_of(*code, colour)),
            [4, kind @ 0..=5] => kept.push(format!("4:{kind}")),
            [
                code @ (0..=7
                | 9
                | 21..=25
                | 27..=29
                | 30..=37
                | 39..=47
                | 49
                | 53
                | 55
                | 90..=97
                | 100..=107),
            ] => {
                kept.push(code.to_string());
            }
            _ => {}
        }
    }
    kept
}

/// A number of a parameter; an empty one is 0.
fn number(text: &str) -> Option<u16> {
    if text.is_empty() { Some(0) } else { text.parse().ok() }
}

/// The parameters of a colour of its own: `5;N` or `2;R;G;B`.
fn colour_of(code: u16, colour: &[u16]) -> Option<String> {
    let is_known = matches!(colour, [5, _] | [2, _, _, _]) && colour.iter().all(|part| *part <= 255);
    let parts: Vec<String> = colour.iter().map(u16::to_string).collect();
    (is_known && code != 58).then(|| format!("{code};{}", parts.join(";")))
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
            ("\x1b[8mx\x1b[08my\x1b[38:5;8mz", "xyz"),
            ("\x1b[1;8mx\x1b[8:1;0000000000000000031my", "\x1b[1mx\x1b[31my\x1b[0m"),
            ("\x1b[4294967304mx\x1b[65544my\x1b[-8mz\x1b[+8m", "xyz"),
            (
                "\x1b[38;5;8mx\x1b[48:2::1:2:3my\x1b[38:2:4:5:6mz",
                "\x1b[38;5;8mx\x1b[48;2;1;2;3my\x1b[38;2;4;5;6mz\x1b[0m",
            ),
            ("\x1b[58;5;8mx\x1b[58:5:8;1my\x1b[38;5:8mz\x1b[38;9;8m", "x\x1b[1myz\x1b[0m"),
            ("\x1b[38;5;8;8;9mx\x1b[38;2;1;8mz", "\x1b[38;5;8;9mxz\x1b[0m"),
            ("\x1b[38;5;300;8mx\x1b[4:3;my", "x\x1b[4:3;0my"),
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
