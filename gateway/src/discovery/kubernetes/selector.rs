//! Which pods are workers, and of which role: labels that must match. *Pure.*

use std::collections::{BTreeMap, BTreeSet};

use crate::config::Role;

/// Characters of a label's name, of its value, and of the prefix before a name.
const NAME_MAX: usize = 63;
const PREFIX_MAX: usize = 253;

/// `key=value` terms that must all match.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Selector(BTreeMap<String, String>);

impl Selector {
    /// From words like `app=sglang`; commas separate terms as well as blanks, as in kubectl.
    ///
    /// # Errors
    /// What is no equality of a label. A selector that was misread would match nothing and say nothing.
    pub fn parse(words: &[String]) -> Result<Self, String> {
        let mut terms = BTreeMap::new();
        for term in words.iter().flat_map(|word| word.split(',')).map(str::trim).filter(|term| !term.is_empty()) {
            let (key, value) =
                term.split_once('=').ok_or_else(|| format!("{term:?} is no label; expected KEY=VALUE"))?;
            let value = value.strip_prefix('=').unwrap_or(value);
            if !is_key(key) {
                return Err(format!("{key:?} in {term:?} is no key of a label; expected KEY=VALUE"));
            }
            if !(value.is_empty() || is_name(value)) {
                return Err(format!("{value:?} in {term:?} is no value of a label; expected KEY=VALUE"));
            }
            if let Some(other) = terms.insert(key.to_owned(), value.to_owned())
                && other != value
            {
                return Err(format!("{key} cannot be {other:?} and {value:?} at once"));
            }
        }
        match terms.is_empty() {
            true => Err("it has no label; expected KEY=VALUE".into()),
            false => Ok(Selector(terms)),
        }
    }

    pub fn matches(&self, labels: &BTreeMap<String, String>) -> bool {
        self.0.iter().all(|(key, value)| labels.get(key) == Some(value))
    }
}

/// `name` or `prefix/name`.
fn is_key(key: &str) -> bool {
    match key.split_once('/') {
        None => is_name(key),
        Some((prefix, name)) => {
            let known = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'-' | b'.');
            !prefix.is_empty() && prefix.len() <= PREFIX_MAX && prefix.bytes().all(known) && is_name(name)
        }
    }
}

fn is_name(name: &str) -> bool {
    let known = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
    let ends = |b: Option<u8>| b.is_some_and(|b| b.is_ascii_alphanumeric());
    name.len() <= NAME_MAX && name.bytes().all(known) && ends(name.bytes().next()) && ends(name.bytes().last())
}

/// How pods become workers.
#[derive(Clone, PartialEq, Debug)]
pub struct Rules {
    selectors: Vec<(Role, Selector)>,
    /// Where pods serve that say nothing else.
    pub port: u16,
}

impl Rules {
    /// # Errors
    /// No selector at all, and selectors that cannot tell two roles apart.
    pub fn new(selectors: Vec<(Role, Selector)>, port: u16) -> Result<Self, String> {
        if selectors.is_empty() {
            return Err("say which pods are workers: --prefill-selector and --decode-selector, or --selector".into());
        }
        for (i, (role, selector)) in selectors.iter().enumerate() {
            if let Some((other, _)) = selectors[..i].iter().find(|(_, s)| s == selector) {
                let (a, b) = (other.worker_type(), role.worker_type());
                return Err(format!("the selectors of {a} and {b} workers are the same; give each a label of its own"));
            }
        }
        Ok(Rules { selectors, port })
    }

    /// The role of a pod with these labels: of the selectors that match, the one with the most labels. `None`: it is no
    /// worker.
    ///
    /// # Errors
    /// Two such selectors match.
    pub fn role(&self, labels: &BTreeMap<String, String>) -> Result<Option<Role>, String> {
        let matching = self.selectors.iter().filter(|(_, selector)| selector.matches(labels));
        let most = matching.clone().map(|(_, selector)| selector.0.len()).max();
        let mut best = matching.filter(|(_, selector)| Some(selector.0.len()) == most).map(|(role, _)| *role);
        match (best.next(), best.next()) {
            (Some(a), Some(b)) => {
                let (a, b) = (a.worker_type(), b.worker_type());
                Err(format!("its labels match the selectors of {a} and of {b} workers"))
            }
            (role, _) => Ok(role),
        }
    }

    /// One selector for the API that lets all workers through: each key that every role names, with the values it may
    /// have. One watch then sees a pod change its role in one event. Empty: all pods.
    pub fn for_api(&self) -> String {
        let mut values: BTreeMap<&str, (usize, BTreeSet<&str>)> = BTreeMap::new();
        for (key, value) in self.selectors.iter().flat_map(|(_, selector)| &selector.0) {
            let (count, set) = values.entry(key).or_default();
            *count += 1;
            set.insert(value);
        }
        let terms = values.into_iter().filter(|(_, (count, _))| *count == self.selectors.len());
        let terms = terms.map(|(key, (_, set))| match set.len() {
            1 => format!("{key}={}", set.into_iter().collect::<String>()),
            _ => format!("{key} in ({})", set.into_iter().collect::<Vec<_>>().join(",")),
        });
        terms.collect::<Vec<_>>().join(",")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn selector(text: &str) -> Result<Selector, String> {
        Selector::parse(&text.split(' ').map(str::to_owned).collect::<Vec<_>>())
    }

    fn labels(text: &str) -> BTreeMap<String, String> {
        selector(text).unwrap().0
    }

    #[test]
    fn blanks_commas_and_double_signs() {
        let expected = labels("app=sglang component=prefill");
        assert_eq!(labels("app=sglang,component==prefill"), expected);
        assert!(selector("app.kubernetes.io/name=x,empty=").is_ok());
    }

    #[test]
    fn what_would_match_nothing_is_refused() {
        for bad in ["app", "", ",", "=x", "app=a app=b", "app!=x", "app in (x)", "-a=b", "a/b/c=d", "app=x y", "a=b:c"]
        {
            assert!(selector(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_selector_with_more_labels_wins_and_a_tie_is_said() {
        let rules = |list: &[(Role, &str)]| {
            Rules::new(list.iter().map(|(role, text)| (*role, selector(text).unwrap())).collect(), 80).unwrap()
        };
        let nested = rules(&[(Role::Plain, "app=x"), (Role::Prefill, "app=x role=p")]);
        assert_eq!(nested.role(&labels("app=x")), Ok(Some(Role::Plain)));
        assert_eq!(nested.role(&labels("app=x role=p more=y")), Ok(Some(Role::Prefill)));
        assert_eq!(nested.role(&labels("app=y role=p")), Ok(None));
        let crossed = rules(&[(Role::Prefill, "a=1"), (Role::Decode, "b=1")]);
        assert!(crossed.role(&labels("a=1 b=1")).unwrap_err().contains("prefill and of decode"));
    }

    #[test]
    fn the_api_is_asked_for_no_more_than_needed_and_no_less() {
        let rules = |list: &[&str]| {
            let roles = [Role::Prefill, Role::Decode, Role::Plain];
            Rules::new(roles.into_iter().zip(list.iter().map(|text| selector(text).unwrap())).collect(), 80).unwrap()
        };
        let both = rules(&["app=x component=prefill", "app=x component=decode only=d"]);
        assert_eq!(both.for_api(), "app=x,component in (decode,prefill)");
        assert_eq!(rules(&["app=x"]).for_api(), "app=x");
        assert_eq!(rules(&["a=1", "b=1"]).for_api(), "");
    }
}
