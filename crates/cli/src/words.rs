//! Instants, distances and texts as people read them.

use belfry_core::display::is_unsafe;
pub use belfry_core::text::count;
use belfry_time::{SignedDuration, Timestamp, Zone};

/// A whole instant: `Mon 2026-03-02 09:00:00 CET`.
pub fn long(at: Timestamp, zone: &Zone) -> String {
    zone.local(at).strftime("%a %Y-%m-%d %H:%M:%S %Z").to_string()
}

/// As little of an instant as it takes seen from now: the time today, the day this week, the date beyond.
pub fn short(at: Timestamp, now: Timestamp, zone: &Zone) -> String {
    let (local, today) = (zone.local(at), zone.local(now));
    let far = at.duration_since(now).abs() >= SignedDuration::from_hours(6 * 24);
    let format = match (local.date() == today.date(), far) {
        (true, _) => "%H:%M:%S",
        (false, false) => "%a %H:%M",
        (false, true) if local.year() == today.year() => "%b %-d %H:%M",
        (false, true) => "%Y-%m-%d",
    };
    local.strftime(format).to_string()
}

/// A distance in its two largest units: `4m10s`, `2h5m`, `3d4h`.
pub fn span(time: SignedDuration) -> String {
    let millis = time.as_millis().unsigned_abs();
    let seconds = millis / 1000;
    let two = |large: u128, a: char, small: u128, b: char| match small {
        0 => format!("{large}{a}"),
        small => format!("{large}{a}{small}{b}"),
    };
    match seconds {
        0 => format!("{millis}ms"),
        1..10 if millis % 1000 >= 100 => format!("{seconds}.{}s", millis % 1000 / 100),
        1..60 => format!("{seconds}s"),
        60..3600 => two(seconds / 60, 'm', seconds % 60, 's'),
        3600..86_400 => two(seconds / 3600, 'h', seconds % 3600 / 60, 'm'),
        86_400..31_536_000 => two(seconds / 86_400, 'd', seconds % 86_400 / 3600, 'h'),
        _ => two(seconds / 31_536_000, 'y', seconds % 31_536_000 / 86_400, 'd'),
    }
}

/// The same of milliseconds.
pub fn span_ms(ms: u64) -> String {
    span(SignedDuration::from_millis(i64::try_from(ms).unwrap_or(i64::MAX)))
}

/// The same to whole seconds, for what changes while it is looked at.
pub fn rough(time: SignedDuration) -> String {
    match time.as_secs() {
        0 => "0s".into(),
        seconds => span(SignedDuration::from_secs(seconds)),
    }
}

/// A sentence in lines that are no wider than this, broken between words.
pub fn wrapped(text: &str, width: Option<u16>) -> String {
    let width = width.map_or(usize::MAX, usize::from);
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let line = lines.last().map_or(0, |line| line.chars().count());
        if line > 0 && line + 1 + word.chars().count() > width {
            lines.push(word.to_owned());
        } else if let Some(last) = lines.last_mut() {
            last.push_str(if line > 0 { " " } else { "" });
            last.push_str(word);
        }
    }
    lines.join("\n")
}

/// Text from outside on one line, at most so long, and without anything that a terminal obeys.
pub fn one_line(text: &str, longest: usize) -> String {
    let clean: String = text.chars().map(|c| if is_unsafe(c) { ' ' } else { c }).collect();
    let clean = clean.split_whitespace().collect::<Vec<_>>().join(" ");
    if clean.chars().count() <= longest {
        return clean;
    }
    let cut: String = clean.chars().take(longest.saturating_sub(1)).collect();
    format!("{}…", cut.trim_end())
}

/// Text from outside with blanks for the characters that a terminal obeys or does not show; lines and tabs stay.
pub fn harmless(text: &str) -> String {
    text.chars().map(|c| if is_unsafe(c) && c != '\n' && c != '\t' { ' ' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_have_two_units() {
        let of = |millis: i64| span(SignedDuration::from_millis(millis));
        let found = [340, 3_400, 34_000, 250_000, 7_500_000, 270_000_000, 40_000_000_000].map(of);
        assert_eq!(found, ["340ms", "3.4s", "34s", "4m10s", "2h5m", "3d3h", "1y97d"]);
    }

    #[test]
    fn sentences_are_broken_between_words() {
        assert_eq!(wrapped("one two three", Some(8)), "one two\nthree");
        assert_eq!(wrapped("one two three", None), "one two three");
        assert_eq!(wrapped("incomprehensible word", Some(8)), "incomprehensible\nword");
    }

    #[test]
    fn text_from_outside_does_nothing_to_a_terminal() {
        assert_eq!(harmless("a\u{1b}[2Jb\r\nc\u{202e}"), "a [2Jb \nc ");
    }

    #[test]
    fn text_from_outside_stays_on_its_line() {
        assert_eq!(one_line("a\n\x1b[31mb\t\u{202e}c", 20), "a [31mb c");
        assert_eq!(one_line("äöü".repeat(10).as_str(), 5), "äöüä…");
    }
}
