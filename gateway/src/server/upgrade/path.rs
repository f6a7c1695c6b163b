//! The unix socket by which a new process finds the one that serves: a file that only its user may use, renamed into place
//! so that it is never half there, and taken away only by the process that put it there.

use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use tokio::net::{UnixListener, UnixStream};

use crate::error::StartError;

/// Listens at a path for a new process.
pub struct Meeting {
    pub listener: UnixListener,
    path: PathBuf,
    /// Device and inode of the file as it was put there.
    identity: (u64, u64),
}

impl Meeting {
    /// Takes the path, whoever had it.
    pub fn at(path: &Path) -> io::Result<Self> {
        let mut beside = path.as_os_str().to_owned();
        beside.push(format!(".{}", std::process::id()));
        let beside = PathBuf::from(beside);
        let _ = std::fs::remove_file(&beside);
        let listener = UnixListener::bind(&beside)?;
        std::fs::set_permissions(&beside, std::fs::Permissions::from_mode(0o600))?;
        let identity = identity(&beside)?;
        std::fs::rename(&beside, path)?;
        Ok(Meeting { listener, path: path.to_owned(), identity })
    }

    /// Whether the path still leads here.
    pub fn is_in_place(&self) -> bool {
        identity(&self.path).is_ok_and(|there| there == self.identity)
    }
}

impl Drop for Meeting {
    fn drop(&mut self) {
        if self.is_in_place() {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    std::fs::symlink_metadata(path).map(|file| (file.dev(), file.ino()))
}

/// Connects to the process that serves.
pub async fn connect(path: &Path) -> Result<UnixStream, StartError> {
    let shown = path.display();
    UnixStream::connect(path).await.map_err(|error| {
        StartError::Upgrade(match error.kind() {
            io::ErrorKind::NotFound => {
                format!("no gateway listens at {shown}; start the first one without --upgrade")
            }
            io::ErrorKind::ConnectionRefused => {
                format!("{shown} is left over from a gateway that is gone; start one without --upgrade")
            }
            io::ErrorKind::PermissionDenied => {
                format!("{shown} belongs to another user; a gateway is taken over only by its own user")
            }
            _ => format!("cannot connect to {shown}: {error}"),
        })
    })
}

/// Refuses a start where the path is another gateway's, or no socket at all.
pub fn check_free(path: &Path) -> Result<(), StartError> {
    let shown = path.display();
    let Ok(found) = std::fs::symlink_metadata(path) else { return Ok(()) };
    if !std::os::unix::fs::FileTypeExt::is_socket(&found.file_type()) {
        let what = format!("--upgrade-sock {shown} is a file and no socket; name another path, or remove it");
        return Err(StartError::Upgrade(what));
    }
    match std::os::unix::net::UnixStream::connect(path) {
        Ok(_) => Err(StartError::Upgrade(format!(
            "a gateway serves already with --upgrade-sock {shown}; take over from it with --upgrade, or name another path"
        ))),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            Err(StartError::Upgrade(format!("--upgrade-sock {shown} belongs to another user; name another path")))
        }
        Err(_) => {
            tracing::info!("{shown} is left over from a gateway that is gone, and replaced");
            Ok(())
        }
    }
}
