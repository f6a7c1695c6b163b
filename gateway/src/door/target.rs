//! What a request asks for: its route, the method that goes with it, and labels from fixed sets. *Pure.*

use http::Method;

use crate::admin;
use crate::door::keys::Right;
use crate::request::Endpoint;

/// Where the request goes.
pub enum Kind {
    Data(Endpoint),
    Admin(admin::Route),
    Unknown,
}

/// What a listener serves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Surface {
    /// Requests of clients and of operators.
    Whole,
    /// What is left for clients where operators have a listener of their own.
    Data,
    Admin,
}

/// A request's aim.
pub struct Target {
    pub kind: Kind,
    pub allowed: Method,
    pub right: Right,
    pub method: Method,
    pub method_label: &'static str,
    pub path_label: &'static str,
}

impl Target {
    pub fn of(surface: Surface, method: &Method, path: &str) -> Self {
        // A HEAD is a GET whose body stays home.
        let method = if *method == Method::HEAD { Method::GET } else { method.clone() };
        let method_label = match method {
            Method::GET => "GET",
            Method::POST => "POST",
            _ => "OTHER",
        };
        let (kind, allowed, right, path_label) = match (Endpoint::of_path(path), admin::route(path, &method)) {
            (Some(endpoint), _) => (Kind::Data(endpoint), Method::POST, Right::Data, endpoint.path()),
            (None, Some((known, allowed, route, right))) => (Kind::Admin(*route), allowed.clone(), *right, *known),
            (None, None) => return Target::unknown(method, method_label),
        };
        let elsewhere = match surface {
            Surface::Whole => false,
            Surface::Data => right == Right::Admin,
            Surface::Admin => matches!(kind, Kind::Data(_)),
        };
        if elsewhere {
            return Target::unknown(method, method_label);
        }
        // Behind the operators' listener questions about the fleet are an operator's, too.
        let right = if surface == Surface::Admin && right == Right::Data { Right::Admin } else { right };
        Target { kind, allowed, right, method, method_label, path_label }
    }

    fn unknown(method: Method, method_label: &'static str) -> Self {
        let (kind, allowed, path_label) = (Kind::Unknown, method.clone(), "other");
        Target { kind, allowed, right: Right::Nobody, method, method_label, path_label }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_of_their_own_takes_operators_routes_away_from_the_data_listener() {
        let right = |surface, path| match Target::of(surface, &Method::GET, path) {
            Target { kind: Kind::Unknown, .. } => None,
            target => Some(target.right),
        };
        for (path, whole, data, admin) in [
            ("/health", Some(Right::Nobody), Some(Right::Nobody), Some(Right::Nobody)),
            ("/v1/models", Some(Right::Data), Some(Right::Data), Some(Right::Admin)),
            ("/workers", Some(Right::Admin), None, Some(Right::Admin)),
            ("/generate", Some(Right::Data), Some(Right::Data), None),
            ("/nowhere", None, None, None),
        ] {
            assert_eq!([Surface::Whole, Surface::Data, Surface::Admin].map(|s| right(s, path)), [whole, data, admin]);
        }
    }
}
