//! What a request asks for: its route, the method that goes with it, and labels from fixed sets. *Pure.*

use http::Method;

use crate::admin;
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
    pub open_to_all: bool,
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
        let (kind, allowed, open_to_all, path_label) = match (Endpoint::of_path(path), admin::route(path)) {
            (Some(endpoint), _) => (Kind::Data(endpoint), Method::POST, false, endpoint.path()),
            (None, Some((known, allowed, route, open))) => (Kind::Admin(*route), allowed.clone(), *open, *known),
            (None, None) => (Kind::Unknown, method.clone(), true, "other"),
        };
        Target { kind, allowed, open_to_all, method, method_label, path_label }
    }
}
