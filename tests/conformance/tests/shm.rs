//! The suite over shared memory.

use tandem_conformance::shm::Shm;

tandem_conformance::suite!(Shm::relayed());
