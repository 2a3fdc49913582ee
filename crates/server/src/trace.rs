//! The trace of a request, as W3C writes it: `00-TRACE-SPAN-FLAGS`. What a caller has begun goes on; else one begins here.

use axum::http::{HeaderMap, HeaderValue};
use uuid::Uuid;

/// A trace, and the step of it that is this request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Trace {
    pub id: Uuid,
    span: u64,
    flags: u8,
}

impl Trace {
    /// The caller's, or a new one.
    pub fn of(headers: &HeaderMap) -> Trace {
        let mut given = headers.get_all("traceparent").iter();
        let one = given.next().filter(|_| given.next().is_none()).and_then(|value| value.to_str().ok());
        let (id, flags) = one.and_then(parse).unwrap_or_else(|| (Uuid::new_v4(), 0));
        let (span, _) = Uuid::new_v4().as_u64_pair();
        Trace { id, span: span.max(1), flags }
    }

    /// As it goes out.
    pub fn header(&self) -> HeaderValue {
        let text = format!("00-{}-{:016x}-{:02x}", self.id.simple(), self.span, self.flags);
        HeaderValue::from_str(&text).unwrap_or(HeaderValue::from_static(""))
    }
}

fn parse(text: &str) -> Option<(Uuid, u8)> {
    let mut parts = text.trim().split('-');
    let (version, trace, span, flags) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
    let is_hex = |text: &str, length: usize| {
        text.len() == length
            && text.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
    };
    // Later versions may have more parts, the first has not.
    let known = is_hex(version, 2) && version != "ff" && (version != "00" || parts.next().is_none());
    if !known
        || !is_hex(trace, 32)
        || !is_hex(span, 16)
        || !is_hex(flags, 2)
        || span.bytes().all(|byte| byte == b'0')
    {
        return None;
    }
    let trace = Uuid::try_parse(trace).ok().filter(|trace| !trace.is_nil())?;
    Some((trace, u8::from_str_radix(flags, 16).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    fn trace(text: &'static str) -> Trace {
        let mut headers = HeaderMap::new();
        headers.insert("traceparent", HeaderValue::from_static(text));
        Trace::of(&headers)
    }

    #[test]
    fn a_trace_that_was_begun_goes_on_under_a_span_of_its_own() {
        let header = trace(GOOD).header();
        let text = header.to_str().unwrap();
        assert!(text.starts_with("00-4bf92f3577b34da6a3ce929d0e0e4736-") && text.ends_with("-01"));
        assert!(!text.contains("00f067aa0ba902b7"));
    }

    #[test]
    fn what_is_no_trace_begins_a_new_one() {
        let id = trace(GOOD).id;
        for text in [
            "",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7",
            "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more",
        ] {
            let other = trace(text).id;
            assert!(other != id && !other.is_nil(), "{text}");
        }
    }
}
