//! A file of workers that is looked at again and again. Polled, since a notification is lost where the file lies on a network
//! or is swapped by symbolic links, as Kubernetes does with ConfigMaps; a look is one `stat`, which follows links.
//! Promises: a version counts only once two looks saw the same one, so that a half-written file is not taken for a short
//! list; a version that cannot be read changes nothing and is told once.

use std::io::Read as _;
use std::path::Path;
use std::time::Instant;

use super::Publisher;
use super::entries::{Format, parse};
use crate::config::{WatchedFile, WorkerSpec};
use crate::versions::Versions;

/// Bytes of a file at most.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// The workers that the file lists now.
///
/// # Errors
/// Names the file, and the line where one is at fault.
pub fn read(path: &Path) -> Result<Vec<WorkerSpec>, String> {
    let failed = |why: String| format!("the workers file {}: {why}", path.display());
    let file = std::fs::File::open(path).map_err(|e| failed(e.to_string()))?;
    let mut text = String::new();
    file.take(FILE_BYTES_MAX + 1).read_to_string(&mut text).map_err(|e| failed(e.to_string()))?;
    if text.len() as u64 > FILE_BYTES_MAX {
        return Err(failed(format!("it is longer than {FILE_BYTES_MAX} bytes")));
    }
    parse(&text, Format::of(path)).map_err(failed)
}

/// Follows the file for ever.
pub async fn watch(file: &WatchedFile, mut publisher: Publisher) {
    let mut versions = Versions::new(file.path.clone());
    loop {
        if versions.is_new() {
            let begun = Instant::now();
            let path = file.path.clone();
            let specs = tokio::task::spawn_blocking(move || read(&path)).await;
            match specs.unwrap_or_else(|_| Err("its reader panicked".into())) {
                Ok(specs) => publisher.publish(specs, begun.elapsed(), ""),
                Err(why) => publisher.failed(&format!("{why}; the workers stay as they were")),
            }
        }
        tokio::time::sleep(file.interval).await;
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::time::Duration;

    use super::super::tests::Recorder;
    use super::*;

    fn list(url: &str) -> String {
        format!("- url: {url}\n")
    }

    async fn watched(path: &Path) -> (Recorder, tokio::task::JoinHandle<()>) {
        let recorder = Recorder::default();
        let publisher = recorder.publisher();
        let file = WatchedFile { path: path.to_owned(), interval: Duration::from_millis(10) };
        (recorder, tokio::spawn(async move { watch(&file, publisher).await }))
    }

    #[tokio::test]
    async fn versions_arrive_however_they_are_written() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("workers.yaml");
        std::fs::write(&path, list("http://a:1")).unwrap();
        let (recorder, task) = watched(&path).await;
        recorder.until(&["http://a:1"]).await;
        // In place, with the same length.
        std::fs::write(&path, list("http://b:1")).unwrap();
        recorder.until(&["http://b:1"]).await;
        // Beside and renamed.
        std::fs::write(dir.path().join("new"), list("http://c:1")).unwrap();
        std::fs::rename(dir.path().join("new"), &path).unwrap();
        recorder.until(&["http://c:1"]).await;
        // Emptied on purpose.
        std::fs::write(&path, "").unwrap();
        recorder.until(&[]).await;
        task.abort();
    }

    /// `workers.yaml -> ..data/workers.yaml`, `..data -> ..1`, then `..data -> ..2` by a rename.
    #[tokio::test]
    async fn a_config_map_is_swapped_by_its_links() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        for (version, url) in [("..1", "http://a:1"), ("..2", "http://b:1")] {
            std::fs::create_dir(at(version)).unwrap();
            std::fs::write(at(version).join("workers.yaml"), list(url)).unwrap();
        }
        symlink("..1", at("..data")).unwrap();
        symlink("..data/workers.yaml", at("workers.yaml")).unwrap();
        let (recorder, task) = watched(&at("workers.yaml")).await;
        recorder.until(&["http://a:1"]).await;
        symlink("..2", at("..tmp")).unwrap();
        std::fs::rename(at("..tmp"), at("..data")).unwrap();
        recorder.until(&["http://b:1"]).await;
        task.abort();
    }

    #[tokio::test]
    async fn a_broken_version_and_a_missing_file_change_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("workers.yaml");
        std::fs::write(&path, list("http://a:1")).unwrap();
        let (recorder, task) = watched(&path).await;
        recorder.until(&["http://a:1"]).await;
        std::fs::write(&path, "- url: [\n").unwrap();
        recorder.until_failures(1).await;
        std::fs::remove_file(&path).unwrap();
        recorder.until_failures(2).await;
        assert_eq!(recorder.urls(), ["http://a:1"]);
        assert!(!recorder.in_sync());
        std::fs::write(&path, list("http://b:1")).unwrap();
        recorder.until(&["http://b:1"]).await;
        assert!(recorder.in_sync());
        task.abort();
    }
}
