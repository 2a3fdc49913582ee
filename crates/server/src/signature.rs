//! Signatures of webhooks. A request is signed in one of three forms, told apart by its headers:
//!
//! | form | headers | what is signed |
//! |---|---|---|
//! | Belfry | `X-Belfry-Timestamp`, `X-Belfry-Signature` | `TIMESTAMP.BODY` |
//! | Standard Webhooks | `webhook-id`, `webhook-timestamp`, `webhook-signature` | `ID.TIMESTAMP.BODY` |
//! | GitHub | `X-Hub-Signature-256`, `X-GitHub-Event`, `X-GitHub-Delivery` | `BODY` |
//!
//! [`Claim::of`] judges the headers, before any byte of the body is read; [`Claim::verify`] compares the signature with
//! the body. All three are HMAC-SHA256 with the same secret, so content that is signed in one form must be content of
//! no other: Belfry's begins with a timestamp and a dot, the standard's with an id that cannot be a timestamp and a
//! dot, and GitHub's with `{` or `payload=`, which neither a timestamp nor an id can.

use std::ops::RangeInclusive;

use axum::http::{HeaderMap, StatusCode};
use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use belfry_time::Timestamp;
use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};

use crate::page::{hex, unhex};
use crate::problem::Problem;

/// How far the sender's clock may be off.
const WINDOW_S: i64 = 300;
/// Digits of a timestamp: every second since 2001 has ten or more.
const TIMESTAMP_DIGITS: RangeInclusive<usize> = 10..=12;
/// Signatures in one request of Belfry's form: one, or two while the sender changes its secret.
const SIGNATURES_MAX: usize = 2;
/// Signatures in one request of Standard Webhooks, those of other versions included.
const STANDARD_SIGNATURES_MAX: usize = 8;
/// Maximum length of a `webhook-id`.
const ID_MAX: usize = 256;
/// How a secret of Standard Webhooks begins that is base64.
const ENCODED_SECRET: &str = "whsec_";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    Belfry,
    Standard,
    GitHub,
}

/// What the headers of a request say about its signature.
#[derive(Debug, PartialEq, Eq)]
pub struct Claim {
    form: Form,
    /// What is signed before the body.
    prefix: String,
    /// At least one.
    signatures: Vec<Vec<u8>>,
    /// The `webhook-id`, which stays the same when the sender tries again.
    pub id: Option<String>,
}

impl Claim {
    /// Reads the headers. `github` says whether GitHub's form is accepted.
    pub fn of(headers: &HeaderMap, github: bool, now: Timestamp) -> Result<Claim, Problem> {
        let mut forms = forms(headers);
        match (forms.next(), forms.next()) {
            (Some(_), Some(_)) => {
                Err(refused("signature_mixed", "the request is signed in more than one form").way_out(
                    "send the headers of one form only: X-Belfry-*, webhook-* or X-Hub-Signature-256",
                ))
            }
            (Some(Form::Belfry), None) => Claim::belfry(headers, now),
            (Some(Form::Standard), None) => Claim::standard(headers, now),
            (Some(Form::GitHub), None) => Claim::github(headers, github),
            (None, _) => Err(missing("the request is not signed")),
        }
    }

    fn belfry(headers: &HeaderMap, now: Timestamp) -> Result<Claim, Problem> {
        let (Some(timestamp), Some(signature)) =
            (one(headers, "x-belfry-timestamp"), one(headers, "x-belfry-signature"))
        else {
            return Err(missing("a request has X-Belfry-Timestamp and X-Belfry-Signature, once each"));
        };
        check_timestamp("X-Belfry-Timestamp", timestamp, now)?;
        let signatures = hex_signatures("X-Belfry-Signature", signature)?;
        Ok(Claim { form: Form::Belfry, prefix: format!("{timestamp}."), signatures, id: None })
    }

    fn standard(headers: &HeaderMap, now: Timestamp) -> Result<Claim, Problem> {
        let (Some(id), Some(timestamp), Some(signature)) = (
            one(headers, "webhook-id"),
            one(headers, "webhook-timestamp"),
            one(headers, "webhook-signature"),
        ) else {
            return Err(missing(
                "a request has webhook-id, webhook-timestamp and webhook-signature, once each",
            ));
        };
        // A dot would move the border between id and timestamp; other signs could make the content look like GitHub's.
        let is_plain = id.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-:".contains(&byte));
        if id.is_empty() || id.len() > ID_MAX || !is_plain || is_timestamp(id) {
            let detail = format!(
                "an id has 1 to {ID_MAX} of A-Z a-z 0-9 `_` `-` `:`, and is no number of {} to {} digits",
                TIMESTAMP_DIGITS.start(),
                TIMESTAMP_DIGITS.end()
            );
            return Err(refused("signature_wrong", &detail).field("webhook-id"));
        }
        check_timestamp("webhook-timestamp", timestamp, now)?;
        let given: Vec<&str> = signature.split(' ').filter(|part| !part.is_empty()).collect();
        // Signatures of other versions are for other readers.
        let ours = given.iter().filter_map(|part| part.strip_prefix("v1,"));
        let signatures: Option<Vec<_>> =
            ours.map(|text| BASE64.decode(text).ok().filter(|bytes| bytes.len() == 32)).collect();
        match signatures {
            Some(signatures) if !signatures.is_empty() && given.len() <= STANDARD_SIGNATURES_MAX => {
                let prefix = format!("{id}.{timestamp}.");
                Ok(Claim { form: Form::Standard, prefix, signatures, id: Some(id.to_owned()) })
            }
            _ => Err(refused("signature_wrong", "a signature is `v1,` and the base64 of 32 bytes")
                .field("webhook-signature")),
        }
    }

    fn github(headers: &HeaderMap, is_allowed: bool) -> Result<Claim, Problem> {
        if !is_allowed {
            return Err(missing("this webhook does not accept GitHub's signature"));
        }
        let names = ["x-hub-signature-256", "x-github-event", "x-github-delivery"];
        let [Some(signature), Some(_), Some(_)] = names.map(|name| one(headers, name)) else {
            return Err(missing(
                "a request of GitHub has X-Hub-Signature-256, X-GitHub-Event and X-GitHub-Delivery, once each",
            ));
        };
        let signatures = hex_signatures("X-Hub-Signature-256", signature)?;
        Ok(Claim { form: Form::GitHub, prefix: String::new(), signatures, id: None })
    }

    /// Compares the signatures with the body. Gives the SHA-256 of the signed content, in hex.
    pub fn verify(&self, secrets: &[Secret], body: &[u8]) -> Result<String, Problem> {
        if self.form == Form::GitHub && !body.starts_with(b"{") && !body.starts_with(b"payload=") {
            let detail = "GitHub sends a JSON object or a form with `payload`, and this is neither";
            return Err(refused("signature_wrong", detail));
        }
        // Every signature is compared with every secret, so that the time tells nothing.
        let mut fits = false;
        for secret in secrets {
            let Ok(mut mac) = Hmac::<Sha256>::new_from_slice(self.key(secret)) else { continue };
            mac.update(self.prefix.as_bytes());
            mac.update(body);
            let right = mac.finalize().into_bytes();
            for signature in &self.signatures {
                fits |= crate::secret::same(signature, &right);
            }
        }
        if !fits {
            let header = match self.form {
                Form::Belfry => "X-Belfry-Signature",
                Form::Standard => "webhook-signature",
                Form::GitHub => "X-Hub-Signature-256",
            };
            return Err(refused("signature_wrong", "the signature is not that of this body").field(header));
        }
        let mut content = Sha256::new();
        content.update(self.prefix.as_bytes());
        content.update(body);
        Ok(hex(&content.finalize()))
    }

    /// The bytes of a secret: its text, or what `whsec_` encodes in the form that knows it.
    fn key<'a>(&self, secret: &'a Secret) -> &'a [u8] {
        let encoded = secret.encoded.as_deref().filter(|_| self.form == Form::Standard);
        encoded.unwrap_or(secret.text.as_bytes())
    }
}

/// The forms that the headers of a request belong to.
fn forms(headers: &HeaderMap) -> impl Iterator<Item = Form> {
    let forms: [(Form, &[&str]); 3] = [
        (Form::Belfry, &["x-belfry-timestamp", "x-belfry-signature"]),
        (Form::Standard, &["webhook-id", "webhook-timestamp", "webhook-signature"]),
        (Form::GitHub, &["x-hub-signature-256"]),
    ];
    let is_present = |names: &[&str]| names.iter().any(|name| headers.contains_key(*name));
    forms.into_iter().filter(move |(_, names)| is_present(names)).map(|(form, _)| form)
}

/// Whether a request says that it is signed.
pub fn is_claimed(headers: &HeaderMap) -> bool {
    forms(headers).next().is_some()
}

/// A secret that requests are signed with.
#[derive(PartialEq, Eq)]
pub struct Secret {
    text: String,
    /// The bytes behind `whsec_`.
    encoded: Option<Vec<u8>>,
}

/// Why a text is no secret.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unusable {
    /// It is blank, or `whsec_` with nothing behind it.
    Empty,
    /// What follows `whsec_` is not base64.
    NotBase64,
}

impl Secret {
    pub fn read(text: String) -> Result<Secret, Unusable> {
        let encoded = text.strip_prefix(ENCODED_SECRET);
        if encoded.unwrap_or(&text).trim().is_empty() {
            return Err(Unusable::Empty);
        }
        let encoded = encoded.map(|text| BASE64.decode(text)).transpose().map_err(|_| Unusable::NotBase64)?;
        Ok(Secret { text, encoded })
    }
}

fn refused(code: &'static str, detail: &str) -> Problem {
    Problem::new(StatusCode::UNAUTHORIZED, code, detail)
}

fn missing(detail: &str) -> Problem {
    refused("signature_missing", detail)
        .way_out("X-Belfry-Signature: sha256=HEX of the HMAC-SHA256 of TIMESTAMP.BODY; or the headers of Standard Webhooks")
}

/// The value of a header that is there exactly once.
fn one<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    let mut values = headers.get_all(name).iter();
    values.next().filter(|_| values.next().is_none()).and_then(|value| value.to_str().ok())
}

/// Whether a text is written as timestamps are.
fn is_timestamp(text: &str) -> bool {
    TIMESTAMP_DIGITS.contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// Seconds since 1970, within the window around now.
fn check_timestamp(header: &str, text: &str, now: Timestamp) -> Result<(), Problem> {
    let Some(seconds) = text.parse::<i64>().ok().filter(|_| is_timestamp(text)) else {
        return Err(refused("timestamp_wrong", "the timestamp must be seconds since 1970").field(header));
    };
    if (now.as_second() - seconds).abs() > WINDOW_S {
        return Err(
            refused("timestamp_late", "the timestamp is more than five minutes away from now").field(header)
        );
    }
    Ok(())
}

/// `sha256=HEX`, or two of them with a comma between.
fn hex_signatures(header: &str, text: &str) -> Result<Vec<Vec<u8>>, Problem> {
    let read =
        |part: &str| part.trim().strip_prefix("sha256=").filter(|text| text.len() == 64).and_then(unhex);
    let signatures: Option<Vec<_>> = text.split(',').map(read).collect();
    signatures.filter(|signatures| signatures.len() <= SIGNATURES_MAX).ok_or_else(|| {
        refused(
            "signature_wrong",
            "a signature is `sha256=` and 64 hex digits, at most two with a comma between",
        )
        .field(header)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: i64 = 1_790_000_000;

    fn mac(secret: &[u8], pieces: &[&[u8]]) -> Vec<u8> {
        let mut mac = Hmac::<Sha256>::new_from_slice(secret).unwrap();
        pieces.iter().for_each(|piece| mac.update(piece));
        mac.finalize().into_bytes().to_vec()
    }

    fn sign(secret: &str, timestamp: &str, body: &[u8]) -> String {
        format!("sha256={}", hex(&mac(secret.as_bytes(), &[timestamp.as_bytes(), b".", body])))
    }

    fn standard(secret: &[u8], id: &str, timestamp: &str, body: &[u8]) -> String {
        let content = [id.as_bytes(), b".", timestamp.as_bytes(), b".", body];
        format!("v1,{}", BASE64.encode(mac(secret, &content)))
    }

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(*name, value.parse().unwrap());
        }
        headers
    }

    fn secret(text: &str) -> Secret {
        Secret::read(text.to_owned()).ok().unwrap()
    }

    /// What a hook that also accepts GitHub's form says.
    fn judge(pairs: &[(&'static str, &str)], body: &[u8], secrets: &[&str]) -> Result<String, Problem> {
        let secrets: Vec<Secret> = secrets.iter().map(|text| secret(text)).collect();
        let claim = Claim::of(&headers(pairs), true, Timestamp::from_second(NOW).unwrap())?;
        claim.verify(&secrets, body)
    }

    fn judge_belfry(at: &str, signature: &str, body: &[u8], secrets: &[&str]) -> Result<String, Problem> {
        judge(&[("x-belfry-timestamp", at), ("x-belfry-signature", signature)], body, secrets)
    }

    fn judge_standard(
        id: &str,
        at: &str,
        signature: &str,
        body: &[u8],
        secret: &str,
    ) -> Result<String, Problem> {
        let pairs = [("webhook-id", id), ("webhook-timestamp", at), ("webhook-signature", signature)];
        judge(&pairs, body, &[secret])
    }

    #[test]
    fn a_signature_over_the_bytes_as_they_came_holds() {
        let (at, body) = (NOW.to_string(), br#"{"b": 1,  "a": 2}"#);
        let good = sign("one", &at, body);
        let content = judge_belfry(&at, &good, body, &["one"]).unwrap();
        let both = format!("{}, {good}", sign("new", &at, body));
        let capitals = good.to_uppercase().replace("SHA256", "sha256");
        for (signature, secrets) in [(&good, &["new", "one"][..]), (&both, &["one"]), (&capitals, &["one"])] {
            assert_eq!(
                judge_belfry(&at, signature, body, secrets).unwrap(),
                content,
                "the same content: {signature}"
            );
        }
    }

    #[test]
    fn what_is_not_signed_so_is_refused() {
        let (at, body) = (NOW.to_string(), br#"{"a":1}"#.as_slice());
        let good = sign("one", &at, body);
        let three = format!("{good},{good},{good}");
        for (signature, body) in [
            (good.as_str(), br#"{"a": 1}"#.as_slice()),
            (&sign("other", &at, body), body),
            (&sign("", &at, body), body),
            (&good[..70], body),
            (&good.replace("sha256=", "sha1="), body),
            (&good.replace("sha256=", ""), body),
            ("sha256=", body),
            (&three, body),
        ] {
            assert!(judge_belfry(&at, signature, body, &["one"]).is_err(), "{signature}");
        }
    }

    #[test]
    fn a_timestamp_is_good_for_five_minutes() {
        let body = b"x";
        for (seconds, good) in [(-300, true), (300, true), (-301, false), (301, false)] {
            let at = (NOW + seconds).to_string();
            assert_eq!(judge_belfry(&at, &sign("one", &at, body), body, &["one"]).is_ok(), good, "{seconds}");
            let signature = standard(b"one", "m", &at, body);
            assert_eq!(judge_standard("m", &at, &signature, body, "one").is_ok(), good, "{seconds}");
        }
        for at in ["", "now", "-5", "1e9", "+1790000000", "99999999999999999999", "1790000000x"] {
            assert!(judge_belfry(at, &sign("one", at, body), body, &["one"]).is_err(), "{at}");
            let signature = standard(b"one", "m", at, body);
            assert!(judge_standard("m", at, &signature, body, "one").is_err(), "{at}");
        }
    }

    /// The example of the specification, with its own secret and message.
    #[test]
    fn the_example_of_standard_webhooks_holds() {
        let secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
        let body = br#"{"test": 2432232314}"#;
        let pairs = [
            ("webhook-id", "msg_p5jXN8AQM9LWM0D4loKWxJek"),
            ("webhook-timestamp", "1614265330"),
            ("webhook-signature", "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="),
        ];
        let now = Timestamp::from_second(1_614_265_330).unwrap();
        let claim = Claim::of(&headers(&pairs), false, now).unwrap();
        assert_eq!(claim.id.as_deref(), Some("msg_p5jXN8AQM9LWM0D4loKWxJek"));
        assert!(claim.verify(&[self::secret(secret)], body).is_ok());
        assert!(claim.verify(&[self::secret(secret)], br#"{"test": 2432232315}"#).is_err());
        let bare = self::secret(&secret.replace("whsec_", ""));
        assert!(claim.verify(&[bare], body).is_err(), "that is another secret");
    }

    #[test]
    fn standard_webhooks_are_signed_with_id_timestamp_and_body() {
        let (at, body) = (NOW.to_string(), b"{}".as_slice());
        let good = standard(b"one", "msg_1", &at, body);
        let wrong = standard(b"two", "msg_1", &at, body);
        for list in
            [good.clone(), format!("{wrong} {good}"), format!("v1a,abc {good}"), format!(" {good}  {wrong}")]
        {
            assert!(judge_standard("msg_1", &at, &list, body, "one").is_ok(), "{list}");
        }
        let many = [good.as_str(); 9].join(" ");
        for (id, list) in [
            ("msg_1", wrong.as_str()),
            ("msg_2", &good),
            ("msg_1", &good.replace("v1,", "v2,")),
            ("msg_1", &good.replace("v1,", "")),
            ("msg_1", "v1,"),
            ("msg_1", ""),
            ("msg_1", "v1,AAAA"),
            ("msg_1", &format!("{good} v1,***")),
            ("msg_1", &many),
            ("", &standard(b"one", "", &at, body)),
            ("a.b", &standard(b"one", "a.b", &at, body)),
            ("{a", &standard(b"one", "{a", &at, body)),
            ("payload=a", &standard(b"one", "payload=a", &at, body)),
        ] {
            assert!(judge_standard(id, &at, list, body, "one").is_err(), "{id} {list}");
        }
    }

    fn judge_github(signature: &str, body: &[u8]) -> Result<String, Problem> {
        let own = [("x-github-event", "push"), ("x-github-delivery", "72d3162e-cc78-11e3-81ab-4c9367dc0958")];
        judge(&[("x-hub-signature-256", signature), own[0], own[1]], body, &["one"])
    }

    #[test]
    fn githubs_form_needs_its_own_headers() {
        let body = br#"{"zen": 1}"#;
        let good = format!("sha256={}", hex(&mac(b"one", &[body])));
        assert!(judge_github(&good, body).is_ok());
        let all =
            [("x-hub-signature-256", good.as_str()), ("x-github-event", "push"), ("x-github-delivery", "d")];
        let now = Timestamp::from_second(NOW).unwrap();
        assert!(Claim::of(&headers(&all), false, now).is_err(), "only where `github: true` is written");
        for without in 1..3 {
            let some: Vec<_> =
                all.iter().enumerate().filter(|(at, _)| *at != without).map(|(_, pair)| *pair).collect();
            assert!(judge(&some, body, &["one"]).is_err(), "{some:?}");
        }
    }

    #[test]
    fn a_signature_of_one_form_is_not_good_as_another() {
        let (at, body) = (NOW.to_string(), b"{}".as_slice());
        let old = (NOW - 86_400).to_string();
        let content = |timestamp: &str| [timestamp.as_bytes(), b".", body].concat();
        for timestamp in [&at, &old] {
            assert!(
                judge_github(&sign("one", timestamp, body), &content(timestamp)).is_err(),
                "Belfry's as GitHub's"
            );
        }
        let encoded = standard(b"one", "m", &at, body);
        let as_hex = format!("sha256={}", hex(&BASE64.decode(encoded.trim_start_matches("v1,")).unwrap()));
        assert!(
            judge_github(&as_hex, format!("m.{at}.{{}}").as_bytes()).is_err(),
            "the standard's as GitHub's"
        );
        assert!(judge_belfry("m", &as_hex, &content(&at), &["one"]).is_err(), "the standard's as Belfry's");
    }

    /// `AT.LATER.{}` is content of both forms: with the id AT, and with the body `LATER.{}`.
    #[test]
    fn an_id_that_could_be_a_timestamp_is_refused() {
        let later = (NOW + 1).to_string();
        for id in [NOW.to_string(), format!("0{NOW}"), format!("00{NOW}"), "999999999999".to_owned()] {
            let signature = standard(b"one", &id, &later, b"{}");
            let refusal = judge_standard(&id, &later, &signature, b"{}", "one").unwrap_err();
            assert!(format!("{refusal:?}").contains("webhook-id"), "{refusal:?}");
        }
        for id in ["1", "123456789", "1790000000001", "m1790000000", "1790000000-1"] {
            let signature = standard(b"one", id, &later, b"{}");
            assert!(judge_standard(id, &later, &signature, b"{}", "one").is_ok(), "{id}");
            let as_hex = BASE64.decode(signature.trim_start_matches("v1,")).unwrap();
            let as_hex = format!("sha256={}", hex(&as_hex));
            let body = format!("{later}.{{}}");
            assert!(judge_belfry(id, &as_hex, body.as_bytes(), &["one"]).is_err(), "{id} as Belfry's");
        }
        // Signed in Belfry's form, sent in the other.
        let at = NOW.to_string();
        let content = mac(b"one", &[at.as_bytes(), b".", later.as_bytes(), b".{}"]);
        let signature = format!("v1,{}", BASE64.encode(content));
        assert!(judge_standard(&at, &later, &signature, b"{}", "one").is_err(), "Belfry's as the standard's");
    }

    #[test]
    fn a_request_has_one_form() {
        let (at, body) = (NOW.to_string(), b"{}".as_slice());
        let ours = [("x-belfry-timestamp", at.as_str()), ("x-belfry-signature", &sign("one", &at, body))];
        let theirs = [
            ("webhook-id", "m"),
            ("webhook-timestamp", at.as_str()),
            ("webhook-signature", &standard(b"one", "m", &at, body)),
        ];
        let plain = format!("sha256={}", hex(&mac(b"one", &[body])));
        let githubs =
            [("x-hub-signature-256", plain.as_str()), ("x-github-event", "push"), ("x-github-delivery", "d")];
        for (some, more) in
            [(&ours[..], &theirs[..]), (&ours, &githubs), (&theirs, &githubs), (&githubs, &ours[..1])]
        {
            let refusal = judge(&[some, more].concat(), body, &["one"]).unwrap_err();
            assert!(format!("{refusal:?}").contains("signature_mixed"), "{refusal:?}");
        }
        assert!(judge(&[], body, &["one"]).is_err());
        let twice = [ours[0], ours[1], ours[1]];
        assert!(judge(&twice, body, &["one"]).is_err());
    }
}
