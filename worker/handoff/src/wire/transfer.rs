//! What moves the pages of a channel: what each side can and may do, and the choice that both make from it. *Pure.*

use super::codec::{Reader, WireError, Writer};

/// Bytes of the name of a host or a socket at most.
pub const NAME_BYTES_MAX: usize = 96;

/// What a worker's settings allow.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Backend {
    /// Shared memory where the two workers can have it, TCP otherwise.
    #[default]
    Auto,
    Tcp,
    /// Shared memory or nothing.
    Shm,
}

impl Backend {
    pub const ALL: [Backend; 3] = [Backend::Auto, Backend::Tcp, Backend::Shm];

    /// The name in flags, logs and messages.
    pub fn name(self) -> &'static str {
        match self {
            Backend::Auto => "auto",
            Backend::Tcp => "tcp",
            Backend::Shm => "shm",
        }
    }
}

/// What one worker tells the other in the handshake.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Transfer {
    pub backend: Backend,
    /// The running kernel: processes that name the same one can share memory. Empty when it is not known.
    pub host: String,
    /// P's abstract Unix socket, at which it hands its pools over. Empty when they are private memory, and on D.
    pub socket: String,
}

/// What moves the pages of one channel.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Path {
    Tcp {
        /// Why not shared memory, where D has not turned it off itself.
        why: Option<&'static str>,
    },
    Shm {
        /// P's socket.
        socket: String,
        /// Without it there is no channel.
        required: bool,
    },
}

impl Path {
    /// The path between these two, the same on both sides.
    ///
    /// # Errors
    /// Names what keeps a side from what its settings demand.
    pub fn between(prefill: &Transfer, decode: &Transfer) -> Result<Self, String> {
        let required = prefill.backend == Backend::Shm || decode.backend == Backend::Shm;
        if prefill.backend == Backend::Tcp || decode.backend == Backend::Tcp {
            return if required {
                let (p, d) = (prefill.backend.name(), decode.backend.name());
                Err(format!(
                    "they differ in --disaggregation-transfer-backend (prefill {p}, decode {d}); with auto on one side \
                     they would agree"
                ))
            } else {
                let other = (decode.backend == Backend::Auto).then_some("the prefill worker is set to tcp");
                Ok(Path::Tcp { why: other })
            };
        }
        let obstacle = if prefill.host.is_empty() || prefill.host != decode.host {
            Some("the two workers run on different hosts (their kernels have different boot ids)")
        } else if prefill.socket.is_empty() {
            Some("the prefill worker serves no shared memory")
        } else {
            None
        };
        match obstacle {
            None => Ok(Path::Shm { socket: prefill.socket.clone(), required }),
            Some(why) if required => Err(format!(
                "{why}, which --disaggregation-transfer-backend shm demands; with auto the pages go by tcp"
            )),
            why => Ok(Path::Tcp { why }),
        }
    }
}

pub(super) fn write(w: &mut Writer, transfer: &Transfer) {
    let backend = match transfer.backend {
        Backend::Auto => 0,
        Backend::Tcp => 1,
        Backend::Shm => 2,
    };
    w.u8(backend).text(&transfer.host, NAME_BYTES_MAX).text(&transfer.socket, NAME_BYTES_MAX);
}

pub(super) fn read(r: &mut Reader<'_>) -> Result<Transfer, WireError> {
    let backend = match r.u8("transfer backend")? {
        0 => Backend::Auto,
        1 => Backend::Tcp,
        2 => Backend::Shm,
        value => return Err(WireError::Unknown { field: "transfer backend", value: value.into() }),
    };
    let host = r.text(NAME_BYTES_MAX, "host")?;
    Ok(Transfer { backend, host, socket: r.text(NAME_BYTES_MAX, "socket")? })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn side(backend: Backend, host: &str, socket: &str) -> Transfer {
        Transfer { backend, host: host.into(), socket: socket.into() }
    }

    #[test]
    fn workers_of_one_host_share_memory_unless_one_will_not() {
        let on = |p, d| Path::between(&side(p, "h", "s"), &side(d, "h", ""));
        for (p, d, required) in [
            (Backend::Auto, Backend::Auto, false),
            (Backend::Auto, Backend::Shm, true),
            (Backend::Shm, Backend::Auto, true),
            (Backend::Shm, Backend::Shm, true),
        ] {
            assert_eq!(on(p, d), Ok(Path::Shm { socket: "s".into(), required }), "{p:?} {d:?}");
        }
        for (p, d) in [(Backend::Auto, Backend::Tcp), (Backend::Tcp, Backend::Tcp)] {
            assert_eq!(on(p, d), Ok(Path::Tcp { why: None }), "{p:?} {d:?}");
        }
        assert_eq!(on(Backend::Tcp, Backend::Auto), Ok(Path::Tcp { why: Some("the prefill worker is set to tcp") }));
        for (p, d) in [(Backend::Tcp, Backend::Shm), (Backend::Shm, Backend::Tcp)] {
            let refusal = on(p, d).expect_err("one demands what the other will not");
            let both = format!("prefill {}, decode {}", p.name(), d.name());
            assert!(refusal.contains(&both), "{refusal}");
        }
    }

    #[test]
    fn what_is_in_the_way_is_named() {
        let (auto, shm) = (Backend::Auto, Backend::Shm);
        for (p_host, d_host, socket, named) in
            [("h", "g", "s", "different hosts"), ("", "", "s", "different hosts"), ("h", "h", "", "serves no shared")]
        {
            let path = Path::between(&side(auto, p_host, socket), &side(auto, d_host, ""));
            assert!(matches!(path, Ok(Path::Tcp { why: Some(why) }) if why.contains(named)), "{path:?}");
            let refusal = Path::between(&side(shm, p_host, socket), &side(auto, d_host, "")).expect_err("demanded");
            assert!(refusal.contains(named), "{refusal}");
        }
    }
}
