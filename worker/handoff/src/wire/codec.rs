//! Reading and writing of bounded little-endian fields. *Pure.* Any bytes give a value or an error, never a panic, and
//! no length that the bytes claim is trusted before it is compared with what is there.

use crate::{
    cause::{Cause, CauseKind, MESSAGE_BYTES_MAX, Side},
    ids::{Attempt, Channel, Incarnation, SessionId},
};

/// Why bytes are no frame. The channel that carried them is closed; nobody else is harmed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum WireError {
    #[error("the frame ends in the middle of {0}")]
    Truncated(&'static str),
    #[error("{0} bytes follow the end of the frame")]
    Trailing(usize),
    #[error("{field} claims {length} entries, {max} is the limit")]
    TooLong { field: &'static str, length: usize, max: usize },
    #[error("{field} has the unknown value {value}")]
    Unknown { field: &'static str, value: u64 },
    #[error("{0} is not UTF-8")]
    NotText(&'static str),
}

pub(crate) struct Reader<'a>(pub &'a [u8]);

impl<'a> Reader<'a> {
    pub fn bytes(&mut self, count: usize, field: &'static str) -> Result<&'a [u8], WireError> {
        let (head, rest) = self.0.split_at_checked(count).ok_or(WireError::Truncated(field))?;
        self.0 = rest;
        Ok(head)
    }

    pub fn array<const N: usize>(&mut self, field: &'static str) -> Result<[u8; N], WireError> {
        let mut out = [0; N];
        out.copy_from_slice(self.bytes(N, field)?);
        Ok(out)
    }

    pub fn u8(&mut self, field: &'static str) -> Result<u8, WireError> {
        Ok(self.array::<1>(field)?[0])
    }

    pub fn flag(&mut self, field: &'static str) -> Result<bool, WireError> {
        match self.u8(field)? {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(WireError::Unknown { field, value: other.into() }),
        }
    }

    pub fn u32(&mut self, field: &'static str) -> Result<u32, WireError> {
        Ok(u32::from_le_bytes(self.array(field)?))
    }

    pub fn u64(&mut self, field: &'static str) -> Result<u64, WireError> {
        Ok(u64::from_le_bytes(self.array(field)?))
    }

    pub fn u128(&mut self, field: &'static str) -> Result<u128, WireError> {
        Ok(u128::from_le_bytes(self.array(field)?))
    }

    pub fn f32(&mut self, field: &'static str) -> Result<f32, WireError> {
        Ok(f32::from_le_bytes(self.array(field)?))
    }

    /// A count of entries of `entry_bytes` each, which must all be there.
    pub fn count(&mut self, max: usize, entry_bytes: usize, field: &'static str) -> Result<usize, WireError> {
        let length = self.u32(field)? as usize;
        if length > max {
            return Err(WireError::TooLong { field, length, max });
        }
        if length * entry_bytes > self.0.len() {
            return Err(WireError::Truncated(field));
        }
        Ok(length)
    }

    pub fn text(&mut self, max: usize, field: &'static str) -> Result<String, WireError> {
        let length = self.count(max, 1, field)?;
        let bytes = self.bytes(length, field)?;
        std::str::from_utf8(bytes).map(str::to_owned).map_err(|_| WireError::NotText(field))
    }

    pub fn channel(&mut self) -> Result<Channel, WireError> {
        Ok(Channel {
            prefill: Incarnation(self.u64("prefill incarnation")?),
            decode: Incarnation(self.u64("decode incarnation")?),
            session: SessionId(self.u64("session")?),
        })
    }

    pub fn attempt(&mut self) -> Result<Attempt, WireError> {
        Ok(self.channel()?.attempt(self.u64("attempt number")?))
    }

    pub fn cause(&mut self) -> Result<Cause, WireError> {
        let side = match self.u8("side")? {
            0 => Side::Prefill,
            1 => Side::Decode,
            other => return Err(WireError::Unknown { field: "side", value: other.into() }),
        };
        let kind = match self.u8("cause")? {
            0 => CauseKind::Refused,
            1 => CauseKind::Aborted,
            2 => CauseKind::Unavailable,
            3 => CauseKind::Timeout,
            4 => CauseKind::Lost,
            5 => CauseKind::Internal,
            6 => CauseKind::Unfit,
            other => return Err(WireError::Unknown { field: "cause", value: other.into() }),
        };
        Ok(Cause::new(side, kind, self.text(MESSAGE_BYTES_MAX, "message")?))
    }

    pub fn end(self) -> Result<(), WireError> {
        if self.0.is_empty() { Ok(()) } else { Err(WireError::Trailing(self.0.len())) }
    }
}

pub(crate) struct Writer(pub Vec<u8>);

impl Writer {
    pub fn u8(&mut self, value: u8) -> &mut Self {
        self.bytes(&[value])
    }

    pub fn u32(&mut self, value: u32) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }

    pub fn u64(&mut self, value: u64) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }

    pub fn u128(&mut self, value: u128) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }

    pub fn f32(&mut self, value: f32) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }

    pub fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.extend_from_slice(bytes);
        self
    }

    /// Lists are bounded where they are made; the limits of the reader are asserted here.
    pub fn count(&mut self, length: usize, max: usize) -> &mut Self {
        assert!(length <= max, "a list of {length} entries is over the wire's limit of {max}");
        self.u32(length as u32)
    }

    pub fn text(&mut self, text: &str, max: usize) -> &mut Self {
        self.count(text.len(), max).bytes(text.as_bytes())
    }

    pub fn channel(&mut self, channel: &Channel) -> &mut Self {
        self.u64(channel.prefill.0).u64(channel.decode.0).u64(channel.session.0)
    }

    pub fn attempt(&mut self, attempt: &Attempt) -> &mut Self {
        self.channel(&attempt.channel()).u64(attempt.number)
    }

    pub fn cause(&mut self, cause: &Cause) -> &mut Self {
        let side = match cause.side {
            Side::Prefill => 0,
            Side::Decode => 1,
        };
        let kind = match cause.kind {
            CauseKind::Refused => 0,
            CauseKind::Aborted => 1,
            CauseKind::Unavailable => 2,
            CauseKind::Timeout => 3,
            CauseKind::Lost => 4,
            CauseKind::Internal => 5,
            CauseKind::Unfit => 6,
        };
        self.u8(side).u8(kind).text(cause.message(), MESSAGE_BYTES_MAX)
    }
}
