//! The sources of settings and their order: file, `LMCACHE_*`, `FOREBAY_*`, code; each outranks
//! those before it.
//!
//! Environment and files come in through [`Loader`], so that a test can set both. Each value is
//! checked by itself, so that an error can name its key and the variable or file. Only the settings
//! file is read, and, where the user set `hugepages`, the two files of the kernel that say which
//! huge pages it has.

use std::ffi::OsString;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::{Map, Value};

use super::keys::{self, Flatten, Layer, is_known};
use super::warning::{Origin, Warning, WarningKind};
use super::{Settings, validate, value};
use crate::error::{Error, ErrorKind, Result};

const TRANSPARENT: &str = "/sys/kernel/mm/transparent_hugepage/enabled";
const RESERVED: &str = "/proc/sys/vm/nr_hugepages";
const OWN_PREFIX: &str = "FOREBAY_";
const LMCACHE_PREFIX: &str = "LMCACHE_";
const CONFIG_FILE: &str = "CONFIG_FILE";
/// Settings whose value in a variable is text, whatever YAML would take it for.
const TEXTS: [&str; 3] = ["fingerprint", "remote_serde", "remote_url"];
/// One whose spaces count too. Of the others a secret may end in a newline.
const SPACED_TEXT: &str = "blend_special_str";
/// A key that code may give to name a settings file. It is not a setting.
const FILE_KEY: &str = "config_file";
/// A settings file has a few lines; a larger one was named by mistake.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// Variables of Forebay that are not settings: of its program, and where it finds that and cuFile.
const OTHERS: [&str; 3] = ["LOG", "PROGRAM", "CUFILE_PATH"];

/// Variables of LMCache itself that are not settings of a cache, and what to use instead of those
/// that a user would miss. A name that ends with `_` stands for all that begin with it.
const LMCACHE_OTHERS: [(&str, &str); 14] = [
    ("LOG_LEVEL", "FOREBAY_LOG sets the level of the tools, VLLM_LOGGING_LEVEL that of the connector"),
    ("LOG_FORMAT", ""),
    ("USE_EXPERIMENTAL", ""),
    ("TRACK_USAGE", ""),
    ("USAGE_TRACK_", ""),
    ("DISABLE_BANNER", ""),
    ("MP_TRANSFER_MODE", ""),
    ("MQ_TIMEOUT", ""),
    ("COORDINATOR_", ""),
    ("RUNTIME_PLUGIN_", ""),
    ("RESP_", ""),
    ("AEROSPIKE_", ""),
    ("DEBUG", ""),
    ("FORCE_SKIP_SAVE", "mode: ro stores nothing"),
];

type ReadFile = Box<dyn Fn(&Path) -> std::io::Result<String>>;

/// Collects the sources of settings.
///
/// ```
/// use forebay::config::Loader;
/// let file = "gds_path: /mnt/nvme\nchunk_size: 64\n";
/// let (settings, _) = Loader::bare()
///     .env([("LMCACHE_CONFIG_FILE", "lmcache.yaml"), ("FOREBAY_CHUNK_SIZE", "128")])
///     .files(move |_| Ok(file.to_owned()))
///     .set("capacity", "64GiB")
///     .load()?;
/// assert_eq!(settings.chunk_size, 128);
/// # Ok::<(), forebay::Error>(())
/// ```
pub struct Loader {
    env: Vec<(String, OsString)>,
    files: ReadFile,
    file: Option<PathBuf>,
    code: Map<String, Value>,
    code_name: String,
}

impl Loader {
    /// The environment and the files of this process.
    #[must_use]
    pub fn process() -> Self {
        let vars = std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value)));
        Self {
            env: vars.collect(),
            files: Box::new(read_file),
            file: None,
            code: Map::new(),
            code_name: "code".to_owned(),
        }
    }

    /// No environment, and the files of this process.
    #[must_use]
    pub fn bare() -> Self {
        Self { env: Vec::new(), files: Box::new(read_file), file: None, code: Map::new(), code_name: "code".to_owned() }
    }

    /// Takes these environment variables in place of the process's.
    #[must_use]
    pub fn env<K: Into<String>, V: Into<OsString>>(mut self, vars: impl IntoIterator<Item = (K, V)>) -> Self {
        self.env = vars.into_iter().map(|(name, value)| (name.into(), value.into())).collect();
        self
    }

    /// Passes over `LMCACHE_*`: where LMCache itself runs in the process, they are meant for it.
    #[must_use]
    pub fn without_lmcache(mut self) -> Self {
        self.env.retain(|(name, _)| !name.starts_with(LMCACHE_PREFIX));
        self
    }

    /// Reads files through `read`.
    #[must_use]
    pub fn files(mut self, read: impl Fn(&Path) -> std::io::Result<String> + 'static) -> Self {
        self.files = Box::new(read);
        self
    }

    /// Reads this file, whatever `FOREBAY_CONFIG_FILE` and `LMCACHE_CONFIG_FILE` say.
    #[must_use]
    pub fn file(mut self, path: impl Into<PathBuf>) -> Self {
        self.file = Some(path.into());
        self
    }

    /// Sets one key, above file and environment.
    #[must_use]
    pub fn set(mut self, key: impl Into<String>, value: impl Into<Value>) -> Self {
        self.code.insert(key.into(), value.into());
        self
    }

    /// Sets the keys of a map, above file and environment.
    #[must_use]
    pub fn map(mut self, map: Map<String, Value>) -> Self {
        self.code.extend(map);
        self
    }

    /// What errors and warnings call the source of [`Loader::set`] and [`Loader::map`]: the place
    /// where the user wrote them, such as `kv_connector_extra_config`.
    #[must_use]
    pub fn code_name(mut self, name: impl Into<String>) -> Self {
        self.code_name = name.into();
        self
    }

    /// Reads all sources and gives the settings with what was found worth telling.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] naming the key, where it was set and what to write instead; the kind
    /// of the I/O error where the settings file cannot be read.
    pub fn load(mut self) -> Result<(Settings, Vec<Warning>)> {
        let mut warnings = Vec::new();
        self.take_file_of_code()?;
        let mut given = Layer::new();
        if let Some((path, strict)) = self.file_to_read()? {
            let map = parse_file(&path, &(self.files)(&path).map_err(|e| self.unreadable(&path, e))?)?;
            let mut layer = Flatten { layer: Layer::new(), warnings: &mut warnings, strict };
            layer.mapping("", map, &Origin::File(path))?;
            given.extend(layer.layer);
        }
        for prefix in [LMCACHE_PREFIX, OWN_PREFIX] {
            given.extend(self.env_layer(prefix, &mut warnings)?);
        }
        let mut layer = Flatten { layer: Layer::new(), warnings: &mut warnings, strict: true };
        layer.mapping("", self.code, &Origin::Code(self.code_name.clone()))?;
        given.extend(layer.layer);

        let settings = settings_of(&given)?;
        validate::check(&settings).map_err(|bad| {
            let origin = given.get(bad.key).map(|given| (given.written.clone(), given.origin.clone()));
            bad.into_error(origin)
        })?;
        warnings.extend(keys::not_active(&given, &settings));
        if let Some(given) = given.get("hugepages").filter(|_| settings.hugepages && has_no_huge_pages(&self.files)) {
            warnings.push(Warning {
                kind: WarningKind::NoHugePages,
                key: given.written.clone(),
                origin: Some(given.origin.clone()),
                message: "this machine has neither reserved nor transparent huge pages; staging takes ordinary ones"
                    .to_owned(),
                advice: format!("reserve some with vm.nr_hugepages, or write `madvise` to {TRANSPARENT}"),
            });
        }
        Ok((settings, warnings))
    }

    /// The settings file that code names beside its own keys.
    fn take_file_of_code(&mut self) -> Result<()> {
        let Some(named) = self.code.remove(FILE_KEY).filter(|named| !named.is_null()) else { return Ok(()) };
        let path = named.as_str().filter(|path| !path.is_empty()).ok_or_else(|| {
            Error::new(
                ErrorKind::Config,
                format!("{FILE_KEY} ({}): {} is not a path", Origin::Code(self.code_name.clone()), value::show(&named)),
            )
            .advice("write the path of a YAML or JSON file with settings")
        })?;
        if self.file.as_ref().is_some_and(|file| file != Path::new(path)) {
            return Err(Error::new(ErrorKind::Config, format!("{FILE_KEY} names another file than the caller"))
                .advice("name one settings file"));
        }
        self.file = Some(PathBuf::from(path));
        Ok(())
    }

    /// The settings file, and whether its unknown keys are errors: LMCache's files hold keys of
    /// LMCache alone.
    fn file_to_read(&self) -> Result<Option<(PathBuf, bool)>> {
        if let Some(path) = &self.file {
            return Ok(Some((path.clone(), true)));
        }
        for (prefix, strict) in [(OWN_PREFIX, true), (LMCACHE_PREFIX, false)] {
            let name = format!("{prefix}{CONFIG_FILE}");
            if let Some((_, path)) = self.env.iter().find(|(key, path)| *key == name && !path.is_empty()) {
                return Ok(Some((PathBuf::from(path), strict)));
            }
        }
        Ok(None)
    }

    fn unreadable(&self, path: &Path, e: std::io::Error) -> Error {
        Error::io("cannot read the settings file", e).at(path).advice(match self.file {
            Some(_) => "correct the path in config_file, or in the option that names the file, or name none",
            None => "correct FOREBAY_CONFIG_FILE or LMCACHE_CONFIG_FILE, or unset it",
        })
    }

    fn env_layer(&self, prefix: &str, warnings: &mut Vec<Warning>) -> Result<Layer> {
        // Never strict: Kubernetes gives every pod FOREBAY_PORT and the like when a service has
        // that name.
        let mut layer = Flatten { layer: Layer::new(), warnings, strict: false };
        for (name, value) in &self.env {
            let Some(key) = name.strip_prefix(prefix) else { continue };
            let is_own_other = prefix == OWN_PREFIX && OTHERS.contains(&key);
            if key == CONFIG_FILE || key.is_empty() || value.is_empty() || is_own_other {
                continue;
            }
            let is_other = |other: &str| key == other || other.ends_with('_') && key.starts_with(other);
            let other = LMCACHE_OTHERS.iter().find(|(other, _)| prefix == LMCACHE_PREFIX && is_other(other));
            if let Some((_, instead)) = other {
                if !instead.is_empty() {
                    layer.warnings.push(Warning {
                        kind: WarningKind::UnknownKey,
                        key: key.to_ascii_lowercase(),
                        origin: Some(Origin::Env(name.clone())),
                        message: "not a setting of Forebay, ignored".into(),
                        advice: (*instead).to_owned(),
                    });
                }
                continue;
            }
            let (key, origin) = (key.to_ascii_lowercase(), Origin::Env(name.clone()));
            // Other programs' variables may hold anything.
            let text = match value.to_str() {
                Some(text) => text,
                None if !is_known(&key) => "",
                None => {
                    return Err(Error::new(ErrorKind::Config, format!("the environment variable {name} is not UTF-8"))
                        .advice("write the value in UTF-8"));
                }
            };
            let value = match key.as_str() {
                SPACED_TEXT => Value::from(unquoted(text)),
                key if TEXTS.contains(&key) || !is_known(key) => Value::from(unquoted(text.trim())),
                _ => env_value(text, &origin)?,
            };
            layer.entry(key, value, &origin)?;
        }
        Ok(layer.layer)
    }
}

/// Whether the machine says that it has no huge pages, neither reserved nor transparent. Only asked
/// where the user set `hugepages`: the default takes ordinary pages without a warning.
fn has_no_huge_pages(files: &dyn Fn(&Path) -> std::io::Result<String>) -> bool {
    let never = files(Path::new(TRANSPARENT)).is_ok_and(|text| text.contains("[never]"));
    never && files(Path::new(RESERVED)).map_or(true, |text| text.trim() == "0")
}

/// A variable's value: a list or mapping where it looks like one, otherwise its text without the
/// quotes around it.
fn env_value(text: &str, origin: &Origin) -> Result<Value> {
    let text = text.trim();
    if text.starts_with(['{', '[']) {
        return serde_saphyr::from_str(text).map_err(|e| {
            Error::new(ErrorKind::Config, format!("the value {origin} is neither JSON nor YAML: {}", first_line(&e)))
                .advice("quote it for the shell, for example '{\"cache_dir\": \"/mnt/nvme\"}'")
        });
    }
    Ok(Value::from(unquoted(text)))
}

/// A text without the quotes around it.
fn unquoted(text: &str) -> &str {
    let inside = ['"', '\''].iter().find_map(|quote| text.strip_prefix(*quote)?.strip_suffix(*quote));
    inside.unwrap_or(text)
}

fn read_file(path: &Path) -> std::io::Result<String> {
    let mut text = String::new();
    std::fs::File::open(path)?.take(MAX_FILE_BYTES + 1).read_to_string(&mut text)?;
    if text.len() as u64 > MAX_FILE_BYTES {
        return Err(std::io::Error::other("it is larger than 1 MiB"));
    }
    Ok(text)
}

fn parse_file(path: &Path, text: &str) -> Result<Map<String, Value>> {
    // JSON is YAML, and this reader refuses a key that stands there twice.
    let parsed = if text.trim().is_empty() { Ok(Value::Null) } else { serde_saphyr::from_str(text) };
    match parsed {
        Ok(Value::Null) => Ok(Map::new()),
        Ok(Value::Object(map)) => Ok(map),
        Ok(_) => Err(Error::new(ErrorKind::Config, "the settings file holds no keys")
            .at(path)
            .advice("write one `key: value` per line, or a JSON object")),
        Err(e) => {
            let json = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("json"));
            let kind = if json { "JSON" } else { "YAML" };
            let reason = first_line(&e);
            Err(Error::new(ErrorKind::Config, format!("the settings file is not valid {kind}: {reason}"))
                .at(path)
                .advice("correct that line; every key stands there once"))
        }
    }
}

/// The parser's message, without its advice to programmers and the excerpt of the file below it.
fn first_line(e: &serde_saphyr::Error) -> String {
    let text = e.to_string();
    let line = text.lines().next().unwrap_or_default();
    line.split(", set DuplicateKeyPolicy").next().unwrap_or_default().to_owned()
}

fn settings_of(given: &Layer) -> Result<Settings> {
    let mut all = Map::new();
    for (key, given) in given {
        let one: Map<String, Value> = [((*key).to_owned(), given.value.clone())].into_iter().collect();
        Settings::deserialize(Value::Object(one)).map_err(|e| {
            let text = e.to_string();
            let (reason, advice) = text.split_once("; ").unwrap_or((&text, ""));
            let error = Error::new(ErrorKind::Config, format!("{} ({}): {reason}", given.written, given.origin));
            let fallback = || format!("docs/configuration.md says what {key} may be");
            error.advice(if advice.is_empty() { fallback() } else { advice.to_owned() })
        })?;
        all.insert((*key).to_owned(), given.value.clone());
    }
    Settings::deserialize(Value::Object(all))
        .map_err(|e| Error::new(ErrorKind::Internal, "settings that are valid one by one are not together").source(e))
}
