//! Replaces secrets in a stream of bytes, also where one is split over two reads.
//!
//! Only what could be the start of a secret is held back, so ordinary output passes at once.

/// What stands in a secret's place.
pub(crate) const MASK: &[u8] = b"***";
/// Shorter values are no secrets: masking `on` or `1` would only make the output unreadable.
pub(crate) const SHORTEST: usize = 4;

/// What must not be shown.
#[derive(Debug, Clone, Default)]
pub(crate) struct Secrets {
    /// Longest first, so that of two that start alike the longer is masked.
    values: Vec<Vec<u8>>,
    /// Whether a byte starts one of them.
    starts: Vec<bool>,
}

impl Secrets {
    pub(crate) fn new(values: impl IntoIterator<Item = Vec<u8>>) -> Secrets {
        let mut all: Vec<Vec<u8>> = Vec::new();
        for value in values {
            // Programs print a value without the line end of the file it came from.
            let trimmed = value.trim_ascii().to_vec();
            all.extend([value, trimmed].into_iter().filter(|value| value.len() >= SHORTEST));
        }
        all.sort_by(|a, b| b.len().cmp(&a.len()).then_with(|| a.cmp(b)));
        all.dedup();
        let mut starts = vec![false; 256];
        for value in &all {
            starts[usize::from(value[0])] = true;
        }
        Secrets { values: all, starts }
    }

    /// Masks a whole text.
    pub(crate) fn mask_text(&self, text: &str) -> String {
        let mut masker = Masker::new(self.clone());
        let mut out = Vec::new();
        masker.feed(text.as_bytes(), &mut out);
        masker.finish(&mut out);
        String::from_utf8_lossy(&out).into_owned()
    }
}

/// Masks one stream.
pub(crate) struct Masker {
    secrets: Secrets,
    /// The start of what may become a secret; shorter than the longest.
    held: Vec<u8>,
}

enum At {
    Nothing,
    Secret(usize),
    Undecided,
}

impl Masker {
    pub(crate) fn new(secrets: Secrets) -> Masker {
        Masker { secrets, held: Vec::new() }
    }

    /// Appends to `out` what of the stream so far is decided.
    pub(crate) fn feed(&mut self, input: &[u8], out: &mut Vec<u8>) {
        if self.secrets.values.is_empty() {
            out.extend_from_slice(input);
        } else if self.held.is_empty() {
            let rest = self.pass(input, out, false);
            self.held.extend_from_slice(&input[rest..]);
        } else {
            let mut joined = std::mem::take(&mut self.held);
            joined.extend_from_slice(input);
            let rest = self.pass(&joined, out, false);
            joined.drain(..rest);
            self.held = joined;
        }
    }

    /// The stream has ended: what was held back was no secret.
    pub(crate) fn finish(&mut self, out: &mut Vec<u8>) {
        let held = std::mem::take(&mut self.held);
        self.pass(&held, out, true);
    }

    /// Returns how much of `bytes` is dealt with.
    fn pass(&self, bytes: &[u8], out: &mut Vec<u8>, ended: bool) -> usize {
        let mut from = 0;
        let mut i = 0;
        while i < bytes.len() {
            if !self.secrets.starts[usize::from(bytes[i])] {
                i += 1;
                continue;
            }
            match self.at(&bytes[i..], ended) {
                At::Nothing => i += 1,
                At::Secret(len) => {
                    out.extend_from_slice(&bytes[from..i]);
                    out.extend_from_slice(MASK);
                    i += len;
                    from = i;
                }
                At::Undecided => {
                    out.extend_from_slice(&bytes[from..i]);
                    return i;
                }
            }
        }
        out.extend_from_slice(&bytes[from..]);
        bytes.len()
    }

    fn at(&self, bytes: &[u8], ended: bool) -> At {
        for secret in &self.secrets.values {
            if bytes.starts_with(secret) {
                return At::Secret(secret.len());
            }
            if !ended && secret.starts_with(bytes) {
                return At::Undecided;
            }
        }
        At::Nothing
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn masked(secrets: &[&str], parts: &[&str]) -> String {
        let mut masker = Masker::new(Secrets::new(secrets.iter().map(|s| s.as_bytes().to_vec())));
        let mut out = Vec::new();
        for part in parts {
            masker.feed(part.as_bytes(), &mut out);
        }
        masker.finish(&mut out);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn a_secret_is_masked_wherever_the_stream_is_cut() {
        let text = "a hunter2secret b hunter2secret hunter2se";
        let whole = masked(&["hunter2secret"], &[text]);
        assert_eq!(whole, "a *** b *** hunter2se");
        for first in 0..=text.len() {
            for second in first..=text.len() {
                let parts = [&text[..first], &text[first..second], &text[second..]];
                assert_eq!(masked(&["hunter2secret"], &parts), whole, "{parts:?}");
            }
        }
    }

    #[test]
    fn of_two_secrets_that_start_alike_the_longer_is_masked() {
        assert_eq!(masked(&["abcd", "abcdefgh"], &["abcd", "efgh abcdef"]), "*** ***ef");
    }

    #[test]
    fn a_short_value_is_no_secret() {
        assert_eq!(masked(&["on", ""], &["on and on"]), "on and on");
    }

    #[test]
    fn the_line_end_of_a_secret_file_does_not_matter() {
        assert_eq!(masked(&["token-1234\n"], &["token-1234."]), "***.");
    }

    #[test]
    fn ordinary_output_is_not_held_back() {
        let mut masker = Masker::new(Secrets::new([b"secret".to_vec()]));
        let mut out = Vec::new();
        masker.feed(b"progress 50%", &mut out);
        assert_eq!(out, b"progress 50%");
    }
}
