//! Encrypted connections to a real server: who is believed, and who is not.

use belfry_store::Store;
use belfry_store::postgres::Postgres;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};

use crate::pg;

/// An authority, and a certificate of its own for a name.
fn certificate(name: &str) -> (String, String, String) {
    let mut authority = CertificateParams::new(Vec::new()).unwrap();
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate().unwrap()).unwrap();
    let key = KeyPair::generate().unwrap();
    let server = CertificateParams::new(vec![name.to_owned()]).unwrap().signed_by(&key, &authority).unwrap();
    (authority.pem(), server.pem(), key.serialize_pem())
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_are_encrypted_and_lead_to_whom_they_should() {
    let Some(mut server) = pg::Own::fresh() else { return };
    let folder = tempfile::tempdir().unwrap();
    let (authority, shown, key) = certificate("localhost");
    let port = server.restart_with_tls(&shown, &key);
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string().replace('/', "%2F")
    };
    let (ours, others) = (file("ours.pem", &authority), file("others.pem", &certificate("localhost").0));
    let open = async |host: &str, how: &str| {
        Postgres::open(&format!("postgres://postgres@{host}:{port}/postgres?{how}")).await
    };
    // The server refuses whoever is not encrypted, so that each that gets in is.
    for (host, how) in [
        ("127.0.0.1", "connect_timeout=10"),
        ("127.0.0.1", "sslmode=require"),
        ("localhost", &format!("sslmode=verify-full&sslrootcert={ours}")),
        ("localhost", &format!("sslrootcert={ours}")),
    ] {
        let store = open(host, how).await.unwrap_or_else(|error| panic!("{how}: {error}"));
        assert_eq!(store.agents().await.unwrap(), [], "{how}");
        // The connection that hears of others is another.
        tokio::time::timeout(std::time::Duration::from_secs(20), store.changed()).await.unwrap();
    }
    for (host, how, words) in [
        ("127.0.0.1", "sslmode=disable".to_owned(), "no encryption"),
        ("localhost", format!("sslmode=verify-full&sslrootcert={others}"), "invalid peer certificate"),
        ("127.0.0.1", format!("sslmode=verify-full&sslrootcert={ours}"), "not valid for"),
        ("localhost", "sslmode=verify-full".to_owned(), "certificate"),
    ] {
        let error =
            open(host, &how).await.err().unwrap_or_else(|| panic!("{how}: it was believed")).to_string();
        assert!(error.contains(words), "{how}: {error}");
    }
}
