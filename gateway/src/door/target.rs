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
    pub fn of(method: &Method, path: &str) -> Self {
        // A HEAD is a GET whose body stays home.
        let method = if *method == Method::HEAD { Method::GET } else { method.clone() };
        let method_label = match method {
            Method::GET => "GET",
            Method::POST => "POST",
            _ => "OTHER",
        };
        let (kind, allowed, right, path_label) = match (Endpoint::of_path(path), admin::route(path)) {
            (Some(endpoint), _) => (Kind::Data(endpoint), Method::POST, Right::Data, endpoint.path()),
            (None, Some((known, allowed, route, right))) => (Kind::Admin(*route), allowed.clone(), *right, *known),
            (None, None) => (Kind::Unknown, method.clone(), Right::Nobody, "other"),
        };
        Target { kind, allowed, right, method, method_label, path_label }
    }
}
