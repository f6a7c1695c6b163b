//! How a worker does, judged from probes and from real traffic. Slow is not dead: bytes of a leg count as much as an
//! answered probe, and only several probes without any answer make a worker silent. *Pure*.

/// How a worker does.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Health {
    /// Not reached yet.
    Unknown,
    Healthy,
    /// It could not be reached; tried only where nobody healthy is left, so that it serves again as soon as it is back.
    Suspect(String),
    /// It may be there, but answers nothing (stopped, swapping, behind a broken network): its open legs fail, and it is not
    /// used until a probe is answered. That it can be connected to proves nothing, since the kernel does that for it.
    Silent(String),
    /// It is there and says that it is not ready.
    NotReady(String),
    /// Its role is not the one it was configured with; it is never used.
    WrongRole(String),
}

impl Health {
    /// Why it is not used.
    pub fn reason(&self) -> &str {
        match self {
            Health::Unknown => "not reached yet",
            Health::Healthy => "healthy",
            Health::Suspect(why) | Health::Silent(why) | Health::NotReady(why) | Health::WrongRole(why) => why,
        }
    }

    pub fn standing(&self) -> Standing {
        match self {
            Health::Healthy => Standing::Healthy,
            Health::Unknown | Health::Suspect(_) => Standing::MaybeBack,
            Health::Silent(_) | Health::NotReady(_) | Health::WrongRole(_) => Standing::Unfit,
        }
    }
}

/// What its health makes of a worker as a candidate.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Standing {
    Healthy,
    /// Only where nobody healthy is left.
    MaybeBack,
    Unfit,
}

/// How many probes in a row decide.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Thresholds {
    /// Without any answer, and no byte of a leg in between: the worker is silent.
    pub failures: u32,
    /// Answered: a worker that was not healthy is.
    pub successes: u32,
}

/// A worker's health and what it is judged from.
#[derive(Clone, Debug)]
pub struct Vitals {
    thresholds: Thresholds,
    health: Health,
    misses: u32,
    answers: u32,
}

impl Vitals {
    pub fn new(thresholds: Thresholds) -> Self {
        Vitals { thresholds, health: Health::Unknown, misses: 0, answers: 0 }
    }

    pub fn health(&self) -> &Health {
        &self.health
    }

    pub fn misses(&self) -> u32 {
        self.misses
    }

    /// A probe was answered with success.
    pub fn answered(&mut self) {
        self.misses = 0;
        self.answers = self.answers.saturating_add(1);
        if self.answers >= self.thresholds.successes {
            self.health = Health::Healthy;
        }
    }

    /// The worker itself says that it must not be used.
    pub fn declined(&mut self, health: Health) {
        self.misses = 0;
        self.answers = 0;
        self.health = health;
    }

    /// A probe got no answer in time. True at the limit, when the worker has become silent.
    pub fn missed(&mut self, why: &str) -> bool {
        self.misses = self.misses.saturating_add(1);
        self.answers = 0;
        let silent = self.misses >= self.thresholds.failures;
        if silent {
            self.health = Health::Silent(format!("{why}, {} times in a row", self.thresholds.failures));
        }
        silent
    }

    /// A leg brought bytes: whoever sends them is not silent.
    pub fn alive(&mut self) {
        self.misses = 0;
    }

    /// A connection succeeded: somebody listens. What a probe found out (silence, not ready, a wrong role) stays the probe's
    /// to change.
    pub fn connected(&mut self) {
        if self.health.standing() == Standing::MaybeBack {
            self.health = Health::Healthy;
        }
    }

    /// Nobody listens there.
    pub fn unreachable(&mut self, why: &str) {
        self.answers = 0;
        self.health = Health::Suspect(why.to_owned());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vitals() -> Vitals {
        Vitals::new(Thresholds { failures: 3, successes: 1 })
    }

    #[test]
    fn a_connection_clears_a_suspicion_but_not_what_a_probe_found() {
        let mut worker = vitals();
        worker.unreachable("refused");
        worker.connected();
        assert_eq!(worker.health(), &Health::Healthy);
        for found in [Health::WrongRole("it is a decode worker".into()), Health::NotReady("503".into())] {
            worker.declined(found.clone());
            worker.connected();
            assert_eq!(worker.health(), &found);
        }
    }

    #[test]
    fn one_missed_probe_is_not_death_and_bytes_in_between_start_over() {
        let mut worker = vitals();
        worker.answered();
        assert!(!worker.missed("slow") && !worker.missed("slow"));
        worker.alive();
        assert!(!worker.missed("slow") && !worker.missed("slow"));
        assert_eq!(worker.health(), &Health::Healthy);
        assert!(worker.missed("slow"));
        assert_eq!(worker.health().reason(), "slow, 3 times in a row");
        worker.connected();
        assert_eq!(worker.health().standing(), Standing::Unfit, "the kernel connects for a stopped process");
        worker.answered();
        assert_eq!(worker.health(), &Health::Healthy);
    }

    #[test]
    fn several_answers_may_be_wanted() {
        let mut worker = Vitals::new(Thresholds { failures: 1, successes: 2 });
        worker.answered();
        assert_eq!(worker.health(), &Health::Unknown);
        worker.missed("no answer");
        worker.answered();
        assert_eq!(worker.health().standing(), Standing::Unfit, "not in a row");
        worker.answered();
        assert_eq!(worker.health(), &Health::Healthy);
    }
}
