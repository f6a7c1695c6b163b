//! One token's keys and values written into its page.

use half::f16;

use crate::{
    kv::{KvPools, Plane},
    simd::{Element, Isa, Kernel, LANES, lanes::Lanes},
};

/// Writes one token's K and V of one head (all replicas) into its page.
///
/// # Panics
/// If the page does not exist, or the rows are not one head.
pub fn write_token(isa: Isa, kv: &KvPools, layer: usize, head: usize, token: (u32, u32), k: &[f32], v: &[f32]) {
    let shape = kv.shape();
    let (page, offset) = token;
    assert!(offset < shape.page_size && k.len() == shape.head_dim as usize && v.len() == k.len(), "one head's row");
    for (plane, row) in [(Plane::K, k), (Plane::V, v)] {
        for base in kv.replicas(page, head, layer, plane) {
            let at = offset as usize * row.len();
            if shape.element_bytes == 2 {
                isa.run(Store::<f16> { row, out: base.cast::<f16>().wrapping_add(at) });
            } else {
                isa.run(Store::<f32> { row, out: base.cast::<f32>().wrapping_add(at) });
            }
        }
    }
}

struct Store<'a, E> {
    row: &'a [f32],
    /// Room for the row in a page that the step owns.
    out: *mut E,
}

impl<E: Element> Kernel for Store<'_, E> {
    type Output = ();
    #[inline(always)]
    unsafe fn run<S: Lanes>(self) {
        let whole = self.row.len() / LANES * LANES;
        for d in (0..whole).step_by(LANES) {
            E::store::<S>(self.out.add(d), S::load(self.row.as_ptr().add(d)));
        }
        for d in whole..self.row.len() {
            self.out.add(d).write(E::from_f32(self.row[d]));
        }
    }
}
