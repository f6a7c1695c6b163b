//! The suite over TCP.

use tandem_conformance::tcp::Tcp;

tandem_conformance::suite!(Tcp::relayed());
