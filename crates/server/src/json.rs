//! JSON from outside, read strictly: no key twice, no NUL, nothing nested deeper than anybody means. What is accepted here
//! means the same to every reader behind it, and every store can keep it.

use std::fmt;

use serde::de::{self, DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use crate::problem::Problem;

/// Lists and objects inside each other.
pub const DEPTH_MAX: usize = 32;

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
    let value = Seed { depth: 0 }.deserialize(&mut reader).map_err(wrong)?;
    reader.end().map_err(wrong)?;
    Ok(value)
}

struct Seed {
    depth: usize,
}

impl<'de> DeserializeSeed<'de> for Seed {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl Seed {
    fn deeper<E: de::Error>(&self) -> Result<usize, E> {
        match self.depth + 1 {
            depth if depth > DEPTH_MAX => Err(E::custom(format!("nested more than {DEPTH_MAX} deep"))),
            depth => Ok(depth),
        }
    }
}

fn text<E: de::Error>(text: String) -> Result<String, E> {
    if text.contains('\0') {
        return Err(E::custom("a text holds a NUL character"));
    }
    Ok(text)
}

impl<'de> Visitor<'de> for Seed {
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
        let depth = self.deeper()?;
        let mut list = Vec::new();
        while let Some(item) = items.next_element_seed(Seed { depth })? {
            list.push(item);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let depth = self.deeper()?;
        let mut map = Map::new();
        while let Some(key) = entries.next_key::<String>()? {
            let key = text(key)?;
            let value = entries.next_value_seed(Seed { depth })?;
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
    fn the_deepest_that_is_allowed_is_read() {
        let nested = format!("{}1{}", "[".repeat(DEPTH_MAX), "]".repeat(DEPTH_MAX));
        assert!(read(nested.as_bytes()).is_ok());
    }
}
