//! The gateway's settings from a file of any text: refused with words or taken, never a panic, and what was taken means the
//! same when it is written down as YAML.

use std::io::Write as _;

use tandem_gateway::{Config, GatewayArgs};

use crate::Target;

/// Reads a configuration file.
pub type Read = fn(&std::path::Path) -> Result<Config, String>;

/// Tries this reader.
pub struct Settings(pub Read);

impl Settings {
    pub fn real() -> Self {
        Self(read)
    }
}

/// The gateway's own.
pub fn read(path: &std::path::Path) -> Result<Config, String> {
    let args = GatewayArgs { config: Some(path.to_owned()), ..GatewayArgs::default() };
    args.merged().and_then(GatewayArgs::checked).map_err(|error| error.to_string())
}

impl Target for Settings {
    fn name(&self) -> &'static str {
        "settings"
    }

    fn seeds(&self) -> Vec<Vec<u8>> {
        let files = [
            "port = 1\nhost = \"::1\"\nprefill = [\"http://a:1 8998\", \"http://b:2\"]\ndecode = \"http://d:1\"\n",
            "worker_urls = [\"http://x:1\", \"https://y\"]\nrequest_timeout_secs = 5\nlog_level = \"info,a=debug\"\n",
            "pd_disaggregation = 1\nprefill = \"http://[::1]:1\"\ndecode = [\"http://d:2\"]\napi_key = 1234\n",
            "worker_urls = \"http://x:1\"\nmax_payload_size = 100\nretry_max_retries = 3\nqueue_size = 1\n",
        ];
        files.iter().map(|file| file.as_bytes().to_vec()).collect()
    }

    fn words(&self) -> &'static [&'static str] {
        &[
            "http://",
            "https://",
            ":65536",
            "[::1]",
            " none",
            "-1",
            "18446744073709551616",
            "true",
            "\"",
            "[",
            "]",
            "=",
            "\n",
            "1e9",
        ]
    }

    fn input_bytes_max(&self) -> usize {
        512
    }

    fn memory_bytes_max(&self, input_bytes: usize) -> usize {
        (8 << 20) + 1024 * input_bytes
    }

    fn run(&self, input: &[u8]) -> String {
        let first = file(".toml", input);
        let config = match (self.0)(first.path()) {
            Ok(config) => config,
            Err(why) => {
                assert!(!why.trim().is_empty(), "a refusal has words");
                return why.split(|c: char| !c.is_ascii_alphabetic()).take(24).collect::<Vec<_>>().join(" ");
            }
        };
        let table: toml::Table =
            std::str::from_utf8(input).ok().and_then(|text| text.parse().ok()).expect("it was read");
        // JSON is YAML, too.
        let again = file(".yaml", serde_json::to_string(&table).expect("a table is an object").as_bytes());
        let again = (self.0)(again.path()).expect("what was taken is taken again");
        assert_eq!(format!("{config:?}"), format!("{again:?}"), "the settings do not come back as they were");
        "taken".into()
    }
}

fn file(suffix: &str, bytes: &[u8]) -> tempfile::NamedTempFile {
    let mut file = tempfile::Builder::new().suffix(suffix).tempfile().expect("a temporary file");
    file.write_all(bytes).expect("the temporary folder takes it");
    file
}
