//! Whether a connection is encrypted, and whom it may lead to: `sslmode` and `sslrootcert` of an address.
//!
//! `disable` never, `prefer` (the default) where the server can, `require` always; these two believe any server, as such
//! addresses do elsewhere. `verify-full` also wants a certificate for that host from an authority that the machine
//! knows, or from one in the file that `sslrootcert` names.

use std::path::Path;
use std::sync::Arc;

use rustls::ClientConfig;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{DigitallySignedStruct, RootCertStore, SignatureScheme};
use rustls_platform_verifier::Verifier;
use tokio_postgres::Config;
use tokio_postgres::config::{Host, SslMode};
use tokio_postgres_rustls::MakeRustlsConnect;

use crate::Error;

/// Reads an address: where to connect, and how.
pub(super) fn read(address: &str) -> Result<(Config, MakeRustlsConnect), Error> {
    let (rest, [mode, root]) = without(address, ["sslmode", "sslrootcert"]);
    let mut config: Config = rest.parse().map_err(|error: tokio_postgres::Error| {
        refused(format!("the address of the database cannot be read: {}", super::connection::words(&error)))
    })?;
    if config.get_ssl_mode() != SslMode::Prefer {
        // It was found in a place where it was not looked for.
        return Err(refused("the address of the database has a `?` that must be written `%3F`".into()));
    }
    let mode = mode.as_deref().unwrap_or(if root.is_some() { "verify-full" } else { "prefer" });
    config.ssl_mode(match mode {
        // Nobody is between us and a socket of this machine.
        _ if is_local(&config) => SslMode::Disable,
        "disable" => SslMode::Disable,
        "prefer" | "allow" => SslMode::Prefer,
        "require" | "verify-full" => SslMode::Require,
        _ => {
            let known = "disable, prefer, require or verify-full";
            return Err(refused(format!("`sslmode` of the database's address is {known}, got {mode:?}")));
        }
    });
    let provider = Arc::new(ring::default_provider());
    let verifier: Arc<dyn ServerCertVerifier> = match (mode, root) {
        ("verify-full", Some(file)) => known_to(Path::new(&file), provider.clone())?,
        (_, Some(_)) => {
            let detail =
                format!("`sslrootcert` is for `sslmode=verify-full`; with {mode:?} nobody would look at it");
            return Err(refused(detail));
        }
        ("verify-full", None) => {
            Arc::new(Verifier::new(provider.clone()).map_err(|error| {
                refused(format!("the certificates of this machine cannot be read: {error}"))
            })?)
        }
        (_, None) => Arc::new(Anybody(provider.clone())),
    };
    let client = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| Error::unexpected(format!("no versions of TLS: {error}")))?
        .dangerous()
        .with_custom_certificate_verifier(verifier)
        .with_no_client_auth();
    Ok((config, MakeRustlsConnect::new(client)))
}

/// Whether all places are sockets of this machine.
fn is_local(config: &Config) -> bool {
    let hosts = config.get_hosts();
    let are_sockets = hosts.iter().all(|host| matches!(host, Host::Unix(_)));
    !hosts.is_empty() && are_sockets && config.get_hostaddrs().is_empty()
}

fn refused(detail: String) -> Error {
    Error::Unavailable { detail, ambiguous: false }
}

/// Certificates that an authority in a file has given.
fn known_to(file: &Path, provider: Arc<CryptoProvider>) -> Result<Arc<dyn ServerCertVerifier>, Error> {
    let unreadable = |why: String| refused(format!("`sslrootcert` {}: {why}", file.display()));
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_file_iter(file).map_err(|error| unreadable(error.to_string()))? {
        let certificate = certificate.map_err(|error| unreadable(error.to_string()))?;
        roots.add(certificate).map_err(|error| unreadable(error.to_string()))?;
    }
    if roots.is_empty() {
        return Err(unreadable("there is no certificate in it".into()));
    }
    let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider).build();
    Ok(verifier.map_err(|error| unreadable(error.to_string()))?)
}

/// Believes any server that holds the key of the certificate it shows.
#[derive(Debug)]
struct Anybody(Arc<CryptoProvider>);

impl ServerCertVerifier for Anybody {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, certificate, signed, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signed, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

/// An address without some of its parameters, and what these were: the last of each counts. Both ways to write one,
/// `postgres://…?name=value&…` and `name=value …`.
fn without<const N: usize>(address: &str, names: [&str; N]) -> (String, [Option<String>; N]) {
    let mut values = [const { None }; N];
    let mut is_ours = |part: &str, is_url: bool| {
        let Some((name, value)) = part.split_once('=') else { return false };
        let Some(at) = names.iter().position(|known| *known == name) else { return false };
        values[at] = Some(if is_url { decoded(value) } else { value.trim_matches('\'').to_owned() });
        true
    };
    let rest = match address.split_once('?') {
        Some((place, query)) if address.contains("://") => {
            let left: Vec<&str> = query.split('&').filter(|part| !is_ours(part, true)).collect();
            if left.is_empty() { place.to_owned() } else { format!("{place}?{}", left.join("&")) }
        }
        None if address.contains("://") => address.to_owned(),
        _ => {
            let left: Vec<&str> = address.split(' ').filter(|part| !is_ours(part, false)).collect();
            left.join(" ")
        }
    };
    (rest, values)
}

/// A value of an address, with `%2F` and its like as what they stand for.
fn decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, more)) = rest.split_first() {
        let code = more.get(..2).filter(|_| *first == b'%').and_then(|code| std::str::from_utf8(code).ok());
        match code.and_then(|code| u8::from_str_radix(code, 16).ok()) {
            Some(byte) => (bytes.push(byte), rest = &more[2..]).1,
            None => (bytes.push(*first), rest = more).1,
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_taken_out_of_both_kinds_of_address() {
        let names = ["sslmode", "sslrootcert"];
        let (rest, values) =
            without("postgres://me@db/x?sslmode=require&options=-c%20a&sslrootcert=%2Ftmp%2Fa+b", names);
        assert_eq!(rest, "postgres://me@db/x?options=-c%20a");
        assert_eq!(values, [Some("require".into()), Some("/tmp/a+b".into())]);
        let (rest, values) = without("postgres://me@db/x?sslmode=require", names);
        assert_eq!((rest.as_str(), values), ("postgres://me@db/x", [Some("require".into()), None]));
        let (rest, values) = without("host=db sslmode=disable user=me", names);
        assert_eq!((rest.as_str(), values), ("host=db user=me", [Some("disable".into()), None]));
    }

    #[test]
    fn what_cannot_be_meant_is_refused_with_the_way_out() {
        for (address, words) in [
            (
                "postgres://db/x?sslmode=verify-ca",
                "disable, prefer, require or verify-full, got \"verify-ca\"",
            ),
            ("postgres://db/x?sslmode=require&sslrootcert=a.pem", "is for `sslmode=verify-full`"),
            ("postgres://me:a?b@db/x?sslmode=require", "must be written `%3F`"),
            ("postgres://db/x?sslrootcert=no/such.pem", "`sslrootcert` no/such.pem"),
        ] {
            let error = read(address).err().unwrap().to_string();
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn a_socket_of_this_machine_needs_none() {
        let (config, _) = read("host=/run/db user=me sslmode=require").unwrap();
        assert_eq!(config.get_ssl_mode(), SslMode::Disable);
        for (address, mode) in [
            ("postgres://me@db/x", SslMode::Prefer),
            ("postgres://me@/x?hostaddr=10.0.0.5&sslmode=require", SslMode::Require),
            ("host=/run/db hostaddr=10.0.0.5 sslmode=require", SslMode::Require),
        ] {
            assert_eq!(read(address).unwrap().0.get_ssl_mode(), mode, "{address}");
        }
    }
}
