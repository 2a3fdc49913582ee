//! The child's environment: an allow-list, what the agent sets, and Belfry's own variables. Nothing else of the node's
//! environment reaches a child, above all not the store's address and no API token. A value of `env` is a template: its own
//! text may hold references, what is filled in is never scanned for them.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use belfry_core::reference::{self, Flaw, Piece};
use belfry_core::template::{Budget, Part, Template, Values};
use belfry_core::text::on_node;
use belfry_core::work::{OWN_VARIABLES, Work, is_own_variable, is_secret_name};

use crate::error::Error;
use crate::plan::wrong;

/// Passed on where the node has them.
const ALLOWED: [&str; 9] = ["PATH", "HOME", "USER", "LANG", "TZ", "TMPDIR", "TERM", "SHELL", "LC_*"];
/// Where the node has no `PATH`.
const DEFAULT_PATH: &str = "/usr/local/bin:/usr/bin:/bin";

/// Variables by name.
pub(crate) type Variables = BTreeMap<OsString, OsString>;

/// What `env` and `env_pass` come to on this node.
#[derive(Debug)]
pub(crate) struct Resolved {
    /// Without Belfry's own variables.
    pub variables: Variables,
    /// Values that must not be shown.
    pub secrets: Vec<Vec<u8>>,
}

/// Resolves an agent's environment against the node's, and fills in its templates.
pub(crate) fn resolve(
    work: &Work,
    node: &Variables,
    values: &Values<'_>,
    budget: &mut Budget,
) -> Result<Resolved, Error> {
    let mut variables = Variables::new();
    let mut secrets = Vec::new();
    for (name, value) in node {
        if is_allowed(name) {
            variables.insert(name.clone(), value.clone());
        }
    }
    variables.entry("PATH".into()).or_insert_with(|| DEFAULT_PATH.into());
    for name in &work.env_pass {
        check_name("env_pass", name, is_of_belfry)?;
        if let Some(value) = node.get(OsStr::new(name)) {
            if is_secret_name(name) {
                secrets.push(value.as_bytes().to_vec());
            }
            variables.insert(name.into(), value.clone());
        }
    }
    for (name, value) in &work.env {
        check_name("env", name, is_own_variable)?;
        let place = format!("env.{name}");
        let template = Template::parse(value).map_err(|error| wrong(&place, &error))?;
        let mut out = Vec::new();
        let mut expanded = Ok(());
        let mut add = |part: Part<'_>| match part {
            Part::Value(value) => out.extend_from_slice(value.as_bytes()),
            Part::Text(text) if expanded.is_ok() => {
                expanded = expand(name, text, node, &mut secrets, &mut out);
            }
            Part::Text(_) => {}
        };
        template.render_parts(values, budget, &mut add).map_err(|error| wrong(&place, &error))?;
        expanded?;
        if out.contains(&0) {
            return Err(Error::Environment(format!("env {name}: the value has a NUL byte in it")));
        }
        variables.insert(name.into(), OsString::from_vec(out));
    }
    Ok(Resolved { variables, secrets })
}

fn is_allowed(name: &OsStr) -> bool {
    ALLOWED.iter().any(|allowed| match allowed.strip_suffix('*') {
        Some(prefix) => name.as_bytes().starts_with(prefix.as_bytes()),
        None => name == OsStr::new(allowed),
    })
}

/// The node's own variables hold its store's address and its token: no child gets them.
fn is_of_belfry(name: &str) -> bool {
    name.starts_with(OWN_VARIABLES)
}

fn check_name(key: &str, name: &str, is_own: fn(&str) -> bool) -> Result<(), Error> {
    let problem = if name.is_empty() {
        "a variable needs a name"
    } else if name.contains('=') {
        "a variable's name cannot contain '='"
    } else if name.contains(|c: char| c.is_control()) {
        "a variable's name cannot contain a line end or control character"
    } else if is_own(name) {
        "names that start with BELFRY_ are Belfry's own"
    } else {
        return Ok(());
    };
    Err(Error::Environment(format!("{key} {name:?}: {problem}")))
}

/// Fills in the references of a text. Their values are secrets.
fn expand(
    key: &str,
    text: &str,
    node: &Variables,
    secrets: &mut Vec<Vec<u8>>,
    out: &mut Vec<u8>,
) -> Result<(), Error> {
    let pieces = reference::pieces(text).map_err(|flaw| {
        Error::Environment(match flaw {
            Flaw::Unclosed(_) => format!("env {key}: a `${{` without a `}}`"),
            Flaw::NoName(_) => format!("env {key}: a reference names no variable"),
            Flaw::Nested(_) => format!("env {key}: a default holds a reference; it must be plain text"),
        })
    })?;
    for piece in pieces {
        let (name, default) = match piece {
            Piece::Text(text) => {
                out.extend_from_slice(text.as_bytes());
                continue;
            }
            Piece::Reference { name, default, .. } => (name, default),
        };
        check_name(&format!("env {key}: ${{…}}"), name, is_of_belfry)?;
        // As in a shell, `:-` also stands in for an empty value.
        match (node.get(OsStr::new(name)).filter(|value| default.is_none() || !value.is_empty()), &default) {
            (Some(value), _) => {
                secrets.push(value.as_bytes().to_vec());
                out.extend_from_slice(value.as_bytes());
            }
            (None, Some(default)) => out.extend_from_slice(default.as_bytes()),
            (None, None) => {
                let name = on_node(name);
                return Err(Error::Environment(format!(
                    "env {key}: its variable is not set; set it, or write a default, ${{NAME:-default}}{name}"
                )));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use belfry_time::Zone;
    use serde_json::json;

    use super::*;

    fn node() -> Variables {
        [
            ("PATH", "/bin"),
            ("LC_ALL", "C"),
            ("BELFRY_STORE", "postgres://secret"),
            ("OTHER", "x"),
            ("T", "t0ken"),
            ("EMPTY", ""),
        ]
        .into_iter()
        .map(|(name, value)| (name.into(), value.into()))
        .collect()
    }

    fn work(env: &[(&str, &str)], pass: &[&str]) -> Work {
        Work {
            env: env.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect(),
            env_pass: pass.iter().map(|name| name.to_string()).collect(),
            ..Work::default()
        }
    }

    fn resolved(work: &Work) -> Result<Resolved, Error> {
        let payload = json!({"x": "${T} $${T} $(id)", "nul": "a\0B=1", "nope": null});
        let zone = Zone::utc();
        let values = Values {
            prompt: Some("${T}"),
            payload: &payload,
            command: "poll",
            agent: "a",
            schedule: "s",
            session: None,
            run: "1",
            attempt: 1,
            tick_at: None,
            last_success_at: None,
            zone: &zone,
        };
        resolve(work, &node(), &values, &mut Budget::default())
    }

    fn one(value: &str) -> Result<(String, Vec<Vec<u8>>), String> {
        let resolved = resolved(&work(&[("A", value)], &[])).map_err(|error| error.to_string())?;
        Ok((resolved.variables[OsStr::new("A")].to_string_lossy().into_owned(), resolved.secrets))
    }

    #[test]
    fn only_what_is_allowed_or_named_comes_from_the_node() {
        let resolved = resolved(&work(&[("A", "1")], &["OTHER", "ABSENT"])).unwrap();
        let names: Vec<_> =
            resolved.variables.keys().map(|name| name.to_string_lossy().into_owned()).collect();
        assert_eq!(names, ["A", "LC_ALL", "OTHER", "PATH"]);
    }

    #[test]
    fn references_are_resolved_and_their_values_are_secrets() {
        assert_eq!(one("Bearer ${T}!").unwrap(), ("Bearer t0ken!".into(), vec![b"t0ken".to_vec()]));
        assert_eq!(one("${NOPE:-a:-b}").unwrap(), ("a:-b".into(), vec![]));
        assert_eq!(one("${EMPTY:-x}${EMPTY}").unwrap().0, "x");
        assert_eq!(one("$T $$ $${T} $").unwrap(), ("$T $ ${T} $".into(), vec![]));
        assert_eq!(one("$$${T} $$$${T}").unwrap(), ("$t0ken $${T}".into(), vec![b"t0ken".to_vec()]));
    }

    #[test]
    fn a_value_that_was_filled_in_is_never_scanned_for_references() {
        let secret = vec![b"t0ken".to_vec()];
        assert_eq!(one("{{ payload.x }}").unwrap(), ("${T} $${T} $(id)".into(), vec![]));
        assert_eq!(
            one("${T}={{ prompt }}{{ \"${\" }}T}").unwrap(),
            ("t0ken=${T}${T}".into(), secret.clone())
        );
        assert_eq!(
            one("{% if payload.x %}${T}{% else %}${NOPE}{% endif %}").unwrap(),
            ("t0ken".into(), secret)
        );
        assert!(one("${T:-{{ prompt }}}").unwrap_err().contains("without a `}`"));
    }

    #[test]
    fn a_template_that_gives_no_value_is_named() {
        assert_eq!(
            one("{{ payload.nope }}").unwrap_err(),
            "the template `env.A`: `payload.nope` is missing; `{{ payload.nope | default(\"…\") }}` would stand in for it"
        );
        assert!(one("{{ payload.nul }}").unwrap_err().contains("NUL"));
    }

    #[test]
    fn a_missing_variable_is_named() {
        assert_eq!(
            one("${NOPE}").unwrap_err(),
            "env A: its variable is not set; set it, or write a default, ${NAME:-default} (on this node: NOPE)"
        );
        assert!(one("${T").unwrap_err().contains("without a `}`"));
    }

    #[test]
    fn the_stores_address_can_not_be_reached() {
        assert!(one("${BELFRY_STORE}").unwrap_err().contains("Belfry's own"));
        let error = resolved(&work(&[], &["BELFRY_STORE"])).unwrap_err();
        assert_eq!(
            error.to_string(),
            "env_pass \"BELFRY_STORE\": names that start with BELFRY_ are Belfry's own"
        );
    }

    #[test]
    fn a_name_that_no_environment_can_hold_is_refused() {
        for name in ["", "A=B", "A\nB", "A\0", "BELFRY_RUN_ID"] {
            let error = resolved(&work(&[(name, "1")], &[])).unwrap_err().to_string();
            assert!(error.starts_with(&format!("env {name:?}: ")), "{error}");
        }
        assert!(one("a\0b").unwrap_err().contains("NUL"));
    }

    #[test]
    fn a_job_may_be_given_a_server_and_a_token() {
        let work = work(&[("BELFRY_SERVER", "http://other:7400"), ("BELFRY_TOKEN", "${T}")], &[]);
        let resolved = resolved(&work).unwrap();
        assert_eq!(resolved.variables[OsStr::new("BELFRY_TOKEN")], "t0ken");
        assert_eq!(resolved.variables[OsStr::new("BELFRY_SERVER")], "http://other:7400");
    }
}
