//! Pages of lists: how many, and where the next one begins. A cursor names the last thing that was given, so that it stays
//! good whatever comes and goes around it.

use belfry_core::RunId;
use belfry_time::Timestamp;
use uuid::Uuid;

use crate::problem::Problem;

/// Items of a page where nothing is said.
pub const LIMIT: u32 = 100;
/// Items of a page at most.
pub const LIMIT_MAX: u32 = 1000;

/// What a cursor names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cursor {
    /// A schedule, `agent/schedule`.
    Schedule(String),
    Run(RunId),
    /// A tick.
    Tick(Timestamp),
    /// A row of the audit.
    Audit(i64),
    Session(i64),
    Snapshot(i64),
}

/// The number of items that is asked for.
pub fn limit(asked: Option<u32>) -> Result<u32, Problem> {
    match asked.unwrap_or(LIMIT) {
        limit @ 1..=LIMIT_MAX => Ok(limit),
        other => {
            Err(Problem::bad("bad_limit", format!("limit must be 1-{LIMIT_MAX}, got {other}")).field("limit"))
        }
    }
}

impl Cursor {
    /// As it stands in an answer.
    pub fn write(&self) -> String {
        let (kind, bytes) = match self {
            Cursor::Schedule(name) => (b's', name.as_bytes().to_vec()),
            Cursor::Run(run) => (b'r', run.0.as_bytes().to_vec()),
            Cursor::Tick(at) => (b't', at.as_microsecond().to_be_bytes().to_vec()),
            Cursor::Audit(id) => (b'a', id.to_be_bytes().to_vec()),
            Cursor::Session(id) => (b'c', id.to_be_bytes().to_vec()),
            Cursor::Snapshot(id) => (b'n', id.to_be_bytes().to_vec()),
        };
        let mut all = vec![kind];
        all.extend(bytes);
        all.extend(check(&all).to_be_bytes());
        hex(&all)
    }

    /// From a request.
    pub fn read(text: &str) -> Result<Cursor, Problem> {
        read(text).ok_or_else(|| {
            Problem::meaningless("bad_cursor", "the cursor is none that this API gave")
                .field("cursor")
                .way_out("begin without one, and pass on `next` of the answer as it is")
        })
    }

    fn wrong_list() -> Problem {
        Problem::meaningless("bad_cursor", "the cursor belongs to another list").field("cursor")
    }

    pub fn schedule(text: Option<&str>) -> Result<Option<String>, Problem> {
        match text.map(Cursor::read).transpose()? {
            None => Ok(None),
            Some(Cursor::Schedule(name)) => Ok(Some(name)),
            Some(_) => Err(Cursor::wrong_list()),
        }
    }

    pub fn run(text: Option<&str>) -> Result<Option<RunId>, Problem> {
        match text.map(Cursor::read).transpose()? {
            None => Ok(None),
            Some(Cursor::Run(run)) => Ok(Some(run)),
            Some(_) => Err(Cursor::wrong_list()),
        }
    }

    pub fn tick(text: Option<&str>) -> Result<Option<Timestamp>, Problem> {
        match text.map(Cursor::read).transpose()? {
            None => Ok(None),
            Some(Cursor::Tick(at)) => Ok(Some(at)),
            Some(_) => Err(Cursor::wrong_list()),
        }
    }

    pub fn session(text: Option<&str>) -> Result<Option<i64>, Problem> {
        match text.map(Cursor::read).transpose()? {
            None => Ok(None),
            Some(Cursor::Session(id)) => Ok(Some(id)),
            Some(_) => Err(Cursor::wrong_list()),
        }
    }

    pub fn snapshot(text: Option<&str>) -> Result<Option<i64>, Problem> {
        match text.map(Cursor::read).transpose()? {
            None => Ok(None),
            Some(Cursor::Snapshot(id)) => Ok(Some(id)),
            Some(_) => Err(Cursor::wrong_list()),
        }
    }

    pub fn audit(text: Option<&str>) -> Result<Option<i64>, Problem> {
        match text.map(Cursor::read).transpose()? {
            None => Ok(None),
            Some(Cursor::Audit(id)) => Ok(Some(id)),
            Some(_) => Err(Cursor::wrong_list()),
        }
    }
}

fn read(text: &str) -> Option<Cursor> {
    let bytes = unhex(text)?;
    let (all, sum) = bytes.split_last_chunk::<2>()?;
    if check(all) != u16::from_be_bytes(*sum) {
        return None;
    }
    let (kind, rest) = all.split_first()?;
    let number = || rest.try_into().ok().map(i64::from_be_bytes);
    Some(match kind {
        b's' => Cursor::Schedule(String::from_utf8(rest.to_vec()).ok()?),
        b'r' => Cursor::Run(RunId(Uuid::from_slice(rest).ok()?)),
        b't' => Cursor::Tick(Timestamp::from_microsecond(number()?).ok()?),
        b'a' => Cursor::Audit(number()?),
        b'c' => Cursor::Session(number()?),
        b'n' => Cursor::Snapshot(number()?),
        _ => return None,
    })
}

/// Tells a cursor from a text that happens to look like one; no secret.
fn check(bytes: &[u8]) -> u16 {
    let hash =
        bytes.iter().fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193));
    (hash >> 16) as u16 ^ hash as u16
}

/// Bytes as lower-case hex.
pub fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        // Writing to a text does not fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Bytes from hex, of either case.
pub fn unhex(text: &str) -> Option<Vec<u8>> {
    let digits = text.as_bytes();
    if !digits.len().is_multiple_of(2) || !digits.iter().all(u8::is_ascii_hexdigit) {
        return None;
    }
    let value = |digit: u8| (digit as char).to_digit(16).map(|value| value as u8);
    digits.chunks_exact(2).map(|pair| Some(value(pair[0])? << 4 | value(pair[1])?)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_comes_back_as_it_was() {
        let run = RunId(Uuid::from_u128(7));
        let all = [
            Cursor::Schedule("reporter/früh".into()),
            Cursor::Run(run),
            Cursor::Tick(Timestamp::UNIX_EPOCH),
            Cursor::Audit(-3),
            Cursor::Session(4),
            Cursor::Snapshot(5),
        ];
        for cursor in all {
            assert_eq!(Cursor::read(&cursor.write()), Ok(cursor));
        }
    }

    #[test]
    fn what_is_no_cursor_is_refused() {
        for text in ["", "0", "garbage", "00", "ff00ff", "'; drop table runs", &"ab".repeat(5000)] {
            assert!(Cursor::read(text).is_err(), "{text}");
        }
        let mut bent = Cursor::Audit(5).write();
        bent.replace_range(4..6, "01");
        assert!(Cursor::read(&bent).is_err());
    }

    #[test]
    fn a_cursor_of_another_list_is_refused() {
        assert!(Cursor::run(Some(&Cursor::Audit(5).write())).is_err());
    }

    #[test]
    fn a_limit_is_bounded() {
        assert_eq!(limit(None), Ok(LIMIT));
        assert_eq!(limit(Some(1000)), Ok(1000));
        assert!(limit(Some(0)).is_err());
        assert!(limit(Some(1001)).is_err());
    }
}
