//! The pools of one worker process as modelled memory, and a ledger of who may write where. *Pure.*
//!
//! The ledger is the checker's own: it is told by the handoff's calls who holds which page as a destination, and never
//! looks into the pool under test.

use tandem_handoff::layout::PoolShape;

use crate::model;

#[derive(Debug)]
pub struct Memory {
    pub shape: PoolShape,
    ranks: Vec<Vec<u8>>,
    /// Per page: the request whose attempt holds it as a destination.
    held_by: Vec<Option<u64>>,
    /// Pages that the pool calls free, after the last turn.
    pub free: Vec<bool>,
}

impl Memory {
    pub fn new(shape: PoolShape) -> Self {
        let ranks = (0..shape.tp).map(|_| vec![0; shape.pool_bytes()]).collect();
        Self { shape, ranks, held_by: vec![None; shape.pages as usize], free: vec![true; shape.pages as usize] }
    }

    pub fn bytes(&self, rank: u32, at: usize, len: usize) -> &[u8] {
        &self.ranks[rank as usize][at..at + len]
    }

    pub fn write(&mut self, rank: u32, at: usize, bytes: &[u8]) {
        self.ranks[rank as usize][at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// The page that a byte of a rank's pool belongs to.
    pub fn page_of(&self, at: usize) -> u32 {
        (at / self.shape.page_bytes()) as u32
    }

    pub fn holder(&self, page: u32) -> Option<u64> {
        self.held_by[page as usize]
    }

    pub fn hold(&mut self, page: u32, request: u64) {
        self.held_by[page as usize] = Some(request);
    }

    pub fn let_go(&mut self, page: u32) {
        self.held_by[page as usize] = None;
    }

    /// Pages that attempts hold as destinations.
    pub fn held(&self) -> usize {
        self.held_by.iter().flatten().count()
    }

    fn row_at(&self, pages: &[u32], position: usize, local_head: u32, layer: u32, kv: u32) -> usize {
        let page_size = self.shape.page_size as usize;
        let page = pages[position / page_size];
        self.shape.plane_offset(page, local_head, layer, kv) + position % page_size * model::ROW_BYTES
    }

    fn row(&self, rank: u32, at: usize) -> u64 {
        u64::from_le_bytes(self.bytes(rank, at, model::ROW_BYTES).try_into().expect("a row has 8 bytes"))
    }

    /// Reads the rows of one position through a page table, in every rank, head and layer: the history that they stand
    /// for, or what is wrong with them.
    pub fn read_position(&self, pages: &[u32], position: usize) -> Result<u64, String> {
        let mut found = None;
        for rank in 0..self.shape.tp {
            for (local, head) in self.shape.heads_of_rank(rank).enumerate() {
                for layer in 0..self.shape.layers {
                    let key = self.row(rank, self.row_at(pages, position, local as u32, layer, 0));
                    let value = self.row(rank, self.row_at(pages, position, local as u32, layer, 1));
                    let chain = model::chain_of_key(key, head, layer);
                    let first = *found.get_or_insert(chain);
                    if chain != first || value != model::value(chain, head, layer) {
                        let page = pages[position / self.shape.page_size as usize];
                        return Err(format!(
                            "position {position} (page {page}, rank {rank}, head {head}, layer {layer}) holds K \
                             {key:016x} and V {value:016x}, which are no row of one history"
                        ));
                    }
                }
            }
        }
        Ok(found.expect("a pool has heads"))
    }

    /// Writes the rows of one position.
    pub fn write_position(&mut self, pages: &[u32], position: usize, chain: u64) {
        for rank in 0..self.shape.tp {
            for (local, head) in self.shape.heads_of_rank(rank).enumerate() {
                for layer in 0..self.shape.layers {
                    let rows = [model::key(chain, head, layer), model::value(chain, head, layer)];
                    for (kv, row) in rows.into_iter().enumerate() {
                        let at = self.row_at(pages, position, local as u32, layer, kv as u32);
                        self.write(rank, at, &row.to_le_bytes());
                    }
                }
            }
        }
    }

    /// Zeroes the tokens of a page from `from` on.
    pub fn zero_tail(&mut self, page: u32, from: usize) {
        let from = from * model::ROW_BYTES;
        for rank in 0..self.shape.tp {
            for local in 0..self.shape.heads_per_rank() {
                for layer in 0..self.shape.layers {
                    for kv in 0..2 {
                        let at = self.shape.plane_offset(page, local, layer, kv) + from;
                        let len = self.shape.plane_bytes() - from;
                        self.write(rank, at, &vec![0; len]);
                    }
                }
            }
        }
    }

    /// What differs between `pages` and the oracle for this history; whole pages when `whole`, else the rows alone.
    pub fn differs(&self, pages: &[u32], chains: &[u64], whole: bool) -> Option<String> {
        if !whole {
            for (position, &chain) in chains.iter().enumerate() {
                match self.read_position(pages, position) {
                    Ok(found) if found == chain => {}
                    Ok(_) => return Some(format!("position {position} is a row of another history")),
                    Err(what) => return Some(what),
                }
            }
            return None;
        }
        for (index, &page) in pages.iter().enumerate() {
            for rank in 0..self.shape.tp {
                let image = model::page_image(&self.shape, rank, index, chains);
                let heads = self.shape.heads_of_rank(rank).len() * self.shape.head_bytes();
                let at = self.shape.head_offset(page, 0);
                let found = self.bytes(rank, at, heads);
                if let Some(byte) = (0..heads).find(|&byte| found[byte] != image[byte]) {
                    return Some(format!(
                        "page {page} (number {index} of the prompt, rank {rank}) differs at byte {byte}"
                    ));
                }
            }
        }
        None
    }
}
