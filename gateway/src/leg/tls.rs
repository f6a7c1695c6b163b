//! TLS towards workers: whom to trust and what to show, for legs and probes alike.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use pingora::protocols::tls::CaType;
use pingora::tls::{RootCertStore, install_default_crypto_provider, load_certs_and_key_files};
use pingora::upstreams::peer::HttpPeer;
use pingora::utils::tls::{CertKey, WrappedX509, parse_x509};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;

use crate::config::WorkerTls;
use crate::error::StartError;

/// What is read of the files once, at start.
#[derive(Clone, Default)]
pub struct PeerTls {
    authorities: Option<Arc<CaType>>,
    identity: Option<Arc<CertKey>>,
    /// The same for the client of probes.
    roots: Vec<reqwest::Certificate>,
    shown: Option<reqwest::Identity>,
}

impl fmt::Debug for PeerTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (own, shows) = (self.authorities.is_some(), self.identity.is_some());
        f.debug_struct("PeerTls").field("own_authorities", &own).field("shows_certificate", &shows).finish()
    }
}

impl PeerTls {
    /// Reads the files. Fails with what is wrong in which.
    pub fn load(files: &WorkerTls) -> Result<Self, StartError> {
        install_default_crypto_provider();
        let mut all = PeerTls::default();
        let mut trusted = Vec::new();
        for path in &files.authorities {
            for cert in certificates(path)? {
                all.roots.push(reqwest::Certificate::from_der(&cert)?);
                trusted.push(WrappedX509::new(cert.to_vec(), parse_x509));
            }
        }
        all.authorities = (!trusted.is_empty()).then(|| trusted.into());
        if let Some((cert, key)) = &files.identity {
            let bad = |why: String| StartError::Config(format!("--client-cert-path {}: {why}", cert.display()));
            let pair = load_certs_and_key_files(&cert.display().to_string(), &key.display().to_string());
            let (chain, private) = pair
                .map_err(|error| bad(error.to_string()))?
                .ok_or_else(|| bad("there is no certificate in it, or no private key in --client-key-path".into()))?;
            let chain = chain.iter().map(|cert| cert.to_vec()).collect();
            all.identity = Some(Arc::new(CertKey::new(chain, private.secret_der().to_vec())));
            let mut pem = std::fs::read(cert).map_err(|error| bad(error.to_string()))?;
            pem.push(b'\n');
            pem.extend(std::fs::read(key).map_err(|error| bad(error.to_string()))?);
            all.shown = Some(reqwest::Identity::from_pem(&pem)?);
        }
        Ok(all)
    }

    /// For a leg's connection.
    pub fn apply(&self, peer: &mut HttpPeer) {
        peer.options.ca.clone_from(&self.authorities);
        peer.client_cert_key.clone_from(&self.identity);
    }

    /// For the client of probes and questions.
    pub fn client(&self, mut builder: reqwest::ClientBuilder) -> reqwest::ClientBuilder {
        if !self.roots.is_empty() {
            builder = builder.tls_built_in_root_certs(false);
        }
        for root in &self.roots {
            builder = builder.add_root_certificate(root.clone());
        }
        match &self.shown {
            Some(identity) => builder.identity(identity.clone()),
            None => builder,
        }
    }
}

/// The certificates of a PEM file, each of which can be an authority.
fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, StartError> {
    let bad = |why: String| StartError::Config(format!("--ca-cert-paths {}: {why}", path.display()));
    let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let all: Vec<CertificateDer<'static>> = read.map_err(|error| bad(error.to_string()))?;
    if all.is_empty() {
        return Err(bad("there is no certificate in it".into()));
    }
    for cert in &all {
        RootCertStore::empty().add(cert.clone()).map_err(|error| bad(error.to_string()))?;
    }
    Ok(all)
}
