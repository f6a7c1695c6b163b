//! The certificates that clients are served with, and those that they must show. Files that change are read again at a
//! handshake, so that a renewed certificate needs no restart; files that do not fit together leave the old ones in use.

use std::fmt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Instant, SystemTime};

use arc_swap::ArcSwap;
use pingora::listeners::ALPN;
use pingora::listeners::tls::TlsSettings;
use pingora::tls::sign::CertifiedKey;
use pingora::tls::{
    CertificateDer, ClientCertVerified, ClientCertVerifier, ClientHello, CryptoProvider, DigitallySignedStruct,
    HandshakeSignatureValid, ResolvesServerCert, RootCertStore, RusTlsError, SignatureScheme, UnixTime,
    WebPkiClientVerifier, install_default_crypto_provider, load_ca_file_into_store, load_certs_and_key_files,
};
use rustls::DistinguishedName;

use crate::config::ServerTls;
use crate::error::StartError;

/// The certificates of one listener, always whole.
pub struct Certificates {
    files: ServerTls,
    now: ArcSwap<Loaded>,
    opened: Instant,
    /// Milliseconds since `opened` at which the files were looked at last.
    looked: AtomicU64,
    /// Of the files as they were tried last.
    stamp: Mutex<Stamp>,
}

/// When each file was changed last, and how long it was.
type Stamp = Vec<Option<(SystemTime, u64)>>;

/// How often the files are looked at, at most.
const LOOK_MS: u64 = 1000;

struct Loaded {
    key: Arc<CertifiedKey>,
    clients: Option<Arc<dyn ClientCertVerifier>>,
}

impl Certificates {
    /// Reads the files. Fails with what is wrong in which.
    pub fn load(files: ServerTls) -> Result<Arc<Self>, StartError> {
        install_default_crypto_provider();
        let stamp = stamp(&files);
        let loaded = load(&files).map_err(StartError::Config)?;
        Ok(Arc::new(Certificates {
            files,
            now: ArcSwap::from_pointee(loaded),
            opened: Instant::now(),
            looked: AtomicU64::new(0),
            stamp: Mutex::new(stamp),
        }))
    }

    /// What a listener needs to serve with these certificates. HTTP/2 is offered before HTTP/1.1.
    pub fn settings(self: &Arc<Self>) -> Result<TlsSettings, StartError> {
        let failed = |error: Box<pingora::Error>| StartError::Config(format!("TLS: {error}"));
        let mut settings = TlsSettings::intermediate("", "").map_err(failed)?;
        settings.set_cert_resolver(Arc::new(Resolver(self.clone())));
        if self.files.client_ca.is_some() {
            settings.set_client_cert_verifier(Arc::new(Verifier(self.clone())));
        }
        settings.set_alpn(ALPN::H2H1);
        Ok(settings)
    }

    /// Reads the files again if they changed and nobody looked within the last second.
    fn refresh(&self) {
        let now = self.opened.elapsed().as_millis() as u64;
        let last = self.looked.load(Relaxed);
        let mine = || self.looked.compare_exchange(last, now, Relaxed, Relaxed).is_ok();
        if now >= last + LOOK_MS && mine() {
            self.look();
        }
    }

    fn look(&self) {
        let found = stamp(&self.files);
        let mut tried = self.stamp.lock().expect("no panic under this lock");
        if *tried == found {
            return;
        }
        *tried = found;
        match load(&self.files) {
            Ok(loaded) => {
                tracing::info!(cert = %self.files.cert.display(), "certificates were read again");
                self.now.store(Arc::new(loaded));
            }
            Err(why) => tracing::warn!(why, "certificates changed and cannot be used; the old ones stay"),
        }
    }
}

fn stamp(files: &ServerTls) -> Stamp {
    let of = |path: &Path| std::fs::metadata(path).ok().and_then(|m| Some((m.modified().ok()?, m.len())));
    let paths = [Some(&files.cert), Some(&files.key), files.client_ca.as_ref()];
    paths.into_iter().flatten().map(|path| of(path)).collect()
}

fn load(files: &ServerTls) -> Result<Loaded, String> {
    let (cert, key) = (files.cert.display().to_string(), files.key.display().to_string());
    let pair = load_certs_and_key_files(&cert, &key).map_err(|e| format!("TLS: {cert} or {key}: {e}"))?;
    let (chain, private) = pair.ok_or_else(|| format!("TLS: {cert} has no certificate or {key} no private key"))?;
    let provider = CryptoProvider::get_default().ok_or("TLS: no cryptography is installed")?;
    let key = CertifiedKey::from_der(chain, private, provider).map_err(|e| format!("TLS: {cert} and {key}: {e}"))?;
    let clients = match &files.client_ca {
        None => None,
        Some(path) => {
            let shown = path.display();
            let mut roots = RootCertStore::empty();
            load_ca_file_into_store(path, &mut roots).map_err(|e| format!("TLS: {shown}: {e}"))?;
            let verifier = WebPkiClientVerifier::builder(Arc::new(roots)).build();
            Some(verifier.map_err(|e| format!("TLS: {shown}: {e}"))?)
        }
    };
    Ok(Loaded { key: Arc::new(key), clients })
}

/// Gives each handshake the certificate of its time.
struct Resolver(Arc<Certificates>);

impl fmt::Debug for Resolver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Resolver")
    }
}

impl ResolvesServerCert for Resolver {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.0.refresh();
        Some(self.0.now.load().key.clone())
    }
}

/// Judges each client's certificate by the authorities of its time.
struct Verifier(Arc<Certificates>);

impl Verifier {
    fn inner(&self) -> Result<Arc<dyn ClientCertVerifier>, RusTlsError> {
        self.0.now.load().clients.clone().ok_or(RusTlsError::General("no authority for clients is loaded".into()))
    }
}

impl fmt::Debug for Verifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Verifier")
    }
}

impl ClientCertVerifier for Verifier {
    /// None: a client shows what it has. They could not be replaced when the authorities are.
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end: &CertificateDer<'_>,
        chain: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, RusTlsError> {
        self.inner()?.verify_client_cert(end, chain, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, RusTlsError> {
        self.inner()?.verify_tls12_signature(message, cert, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, RusTlsError> {
        self.inner()?.verify_tls13_signature(message, cert, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.inner().map(|verifier| verifier.supported_verify_schemes()).unwrap_or_default()
    }
}
