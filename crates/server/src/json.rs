//! JSON from outside, read strictly: no key twice, no NUL, nothing nested deeper than anybody means, and not so many small
//! values that they take many times the memory of their text. What is accepted here means the same to every reader behind
//! it, and every store can keep it.

use std::cell::Cell;
use std::fmt;

use serde::de::{self, DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use crate::problem::Problem;

/// Lists and objects inside each other.
pub const DEPTH_MAX: usize = 32;
/// What a value takes of memory, about, however short its text.
const VALUE_BYTES: usize = 50;
/// Values and keys of a document.
const VALUES_MAX: usize = 1 << 17;
/// A longer document may have more values: one for so many of its bytes.
const BYTES_PER_VALUE: usize = 8;
/// A list or an object counts as so many values, because it takes memory also while it is nearly empty.
const CONTAINER_VALUES: usize = 10;

/// The memory that a document takes at most, about, by a look at its text.
pub fn memory(bytes: &[u8]) -> usize {
    let (mut values, mut containers) = (1, 0);
    for byte in bytes {
        values += usize::from(matches!(byte, b',' | b':'));
        containers += usize::from(matches!(byte, b'[' | b'{'));
    }
    let values = (values + containers * CONTAINER_VALUES).min(values_max(bytes));
    bytes.len() + values * VALUE_BYTES
}

/// How many values and keys a document may have.
fn values_max(bytes: &[u8]) -> usize {
    VALUES_MAX.max(bytes.len() / BYTES_PER_VALUE)
}

/// Reads a document.
pub fn read(bytes: &[u8]) -> Result<Value, Problem> {
    let text = std::str::from_utf8(bytes).map_err(|error| {
        Problem::bad("bad_json", format!("the body is not UTF-8: byte {} is wrong", error.valid_up_to()))
    })?;
    let mut reader = serde_json::Deserializer::from_str(text);
    // What is JSON all the same, but not for us, is of another kind than what is none.
    let wrong = |error: serde_json::Error| match error.is_data() {
        true => Problem::bad("bad_json", format!("the body is not acceptable: {error}")),
        false => Problem::bad("bad_json", format!("the body is not JSON: {error}")),
    };
    let left = Cell::new(values_max(bytes));
    let value = Seed { depth: 0, left: &left }.deserialize(&mut reader).map_err(wrong)?;
    reader.end().map_err(wrong)?;
    Ok(value)
}

#[derive(Clone, Copy)]
struct Seed<'a> {
    depth: usize,
    /// How many more values the document may have.
    left: &'a Cell<usize>,
}

impl<'de> DeserializeSeed<'de> for Seed<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl Seed<'_> {
    /// Counts values.
    fn count<E: de::Error>(&self, values: usize) -> Result<(), E> {
        let left = self.left.get().checked_sub(values).ok_or_else(|| {
            E::custom(format!(
                "more than {VALUES_MAX} values and keys, of which a list or an object counts as {CONTAINER_VALUES}"
            ))
        })?;
        self.left.set(left);
        Ok(())
    }

    /// For what is inside a list or an object.
    fn deeper<E: de::Error>(self) -> Result<Self, E> {
        self.count(CONTAINER_VALUES)?;
        match self.depth + 1 {
            depth if depth > DEPTH_MAX => Err(E::custom(format!("nested more than {DEPTH_MAX} deep"))),
            depth => Ok(Seed { depth, ..self }),
        }
    }
}

fn text<E: de::Error>(text: String) -> Result<String, E> {
    if text.contains('\0') {
        return Err(E::custom("a text holds a NUL character"));
    }
    Ok(text)
}

impl<'de> Visitor<'de> for Seed<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E: de::Error>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E: de::Error>(self, flag: bool) -> Result<Value, E> {
        Ok(Value::Bool(flag))
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<Value, E> {
        Ok(number.into())
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<Value, E> {
        Ok(number.into())
    }

    fn visit_f64<E: de::Error>(self, number: f64) -> Result<Value, E> {
        Number::from_f64(number).map(Value::Number).ok_or_else(|| E::custom("a number is out of range"))
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<Value, E> {
        text(value.to_owned()).map(Value::String)
    }

    fn visit_string<E: de::Error>(self, value: String) -> Result<Value, E> {
        text(value).map(Value::String)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let inside = self.deeper()?;
        let mut list = Vec::new();
        while let Some(item) = items.next_element_seed(inside)? {
            inside.count(1)?;
            list.push(item);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let inside = self.deeper()?;
        let mut map = Map::new();
        while let Some(key) = entries.next_key::<String>()? {
            let key = text(key)?;
            let value = entries.next_value_seed(inside)?;
            inside.count(2)?;
            if map.contains_key(&key) {
                return Err(de::Error::custom(format!("the key {key:?} is written twice")));
            }
            map.insert(key, value);
        }
        Ok(Value::Object(map))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_plain_is_read() {
        let value =
            read(br#"{"a": [1, -2, 2.5, "x", null, true], "{{7*7}}": {"$where": "${jndi:x}"}}"#).unwrap();
        assert_eq!(value["a"][3], "x");
        assert_eq!(value["{{7*7}}"]["$where"], "${jndi:x}");
    }

    #[test]
    fn what_readers_disagree_about_is_refused() {
        let deep = "[".repeat(100_000);
        let nested = format!("{}1{}", "[".repeat(DEPTH_MAX + 1), "]".repeat(DEPTH_MAX + 1));
        let bodies: [&[u8]; 12] = [
            b"",
            b"{",
            b"{} {}",
            br#"{"a": 1, "a": 2}"#,
            br#"{"a": {"b": 1, "b": 1}}"#,
            br#"{"a": 1e400}"#,
            br#"{"a": "\ud800"}"#,
            br#"{"a": "\u0000"}"#,
            br#"{"\u0000": 1}"#,
            b"\xff\xfe",
            deep.as_bytes(),
            nested.as_bytes(),
        ];
        for body in bodies {
            let shown = String::from_utf8_lossy(&body[..body.len().min(40)]).into_owned();
            assert!(read(body).is_err(), "{shown}");
        }
    }

    #[test]
    fn many_small_values_are_refused_before_they_take_memory() {
        let wrong = |unit: &str| {
            let text = format!("[{}1]", unit.repeat((1 << 20) / unit.len()));
            let problem = read(text.as_bytes()).unwrap_err();
            assert!(format!("{problem:?}").contains("more than 131072 values"), "{problem:?}");
        };
        ["0,", "\"\",", "[],", "{\"\":0},", "{\"a\":[]},"].into_iter().for_each(wrong);
        let keys: Vec<String> = (0..100_000).map(|i| format!("\"{i}\":0")).collect();
        assert!(read(format!("{{{}}}", keys.join(",")).as_bytes()).is_err());
        // A long document of ordinary values, and a short one of many.
        let row = "{\"id\": 1234567, \"name\": \"somebody\", \"price\": 12.5, \"note\": \"as it was before, and no other\"},";
        assert!(read(format!("[{}1]", row.repeat(4_000)).as_bytes()).is_ok());
        assert!(read(format!("[{}1]", "0,".repeat(100_000)).as_bytes()).is_ok());
        assert!(read(format!("[{}1]", "0.12345678,".repeat(500_000)).as_bytes()).is_ok());
    }

    #[test]
    fn the_deepest_that_is_allowed_is_read() {
        let nested = format!("{}1{}", "[".repeat(DEPTH_MAX), "]".repeat(DEPTH_MAX));
        assert!(read(nested.as_bytes()).is_ok());
    }
}
