//! Suggestions for words that are not known.

/// The known word that was most likely meant; none where no word is near.
pub fn nearest<'a>(written: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    if written.len() > 64 {
        return None;
    }
    let written = written.to_lowercase().replace('-', "_");
    let allowed = (written.chars().count() / 3).clamp(1, 3);
    known
        .map(|word| (strsim::damerau_levenshtein(&written, word), word))
        .filter(|(distance, word)| *distance <= allowed && *distance < word.len())
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, word)| word)
}
