//! The CPU backend as the engine sees it.
