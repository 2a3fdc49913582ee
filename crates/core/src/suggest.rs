//! Suggestions for words that are not known.

/// The known word that was most likely meant; none where no word is near.
pub fn nearest<'a>(written: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    if written.len() > 64 {
        return None;
    }
    let plain = |word: &str| word.to_lowercase().replace('-', "_");
    let written = plain(written);
    let allowed = (written.chars().count() / 3).clamp(1, 3);
    known
        .map(|word| (strsim::damerau_levenshtein(&written, &plain(word)), word))
        .filter(|(distance, word)| *distance <= allowed && *distance < word.len())
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, word)| word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slip_is_told_from_another_word() {
        let known = ["reporter", "Nightly-Backup", "a", "b"];
        for (written, near) in [
            ("reportr", Some("reporter")),
            ("REPORTER", Some("reporter")),
            ("nightly_bakcup", Some("Nightly-Backup")),
            ("NIGHTLY-BACKUPS", Some("Nightly-Backup")),
            ("zz", None),
            ("c", None),
            ("archiver", None),
        ] {
            assert_eq!(nearest(written, known.into_iter()), near, "{written}");
        }
    }
}
