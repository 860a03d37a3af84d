//! Whether to ask for more events right after some were handled.
//!
//! An answer without events costs a system call. An answer with events saves one: the worker need not return to its own
//! epoll descriptor to be woken for them.

/// The confidence rises with each answer that has events, and falls with each that has none. So it is high if more than half
/// of them have events, and a few without any do not matter then.
const MAX_CONFIDENCE: u8 = 8;
const MIN_CONFIDENCE_TO_ASK: u8 = 2;
/// While nothing is expected, one of so many occasions is used to find out whether that has changed.
const TRIAL_INTERVAL: u8 = 16;

#[derive(Debug, Clone, Copy)]
pub(super) struct LookAgain {
    confidence: u8,
    /// Occasions that were not used since the last trial.
    skipped: u8,
}

impl LookAgain {
    pub(super) const fn new() -> Self {
        Self { confidence: MIN_CONFIDENCE_TO_ASK, skipped: 0 }
    }

    /// Whether to ask on this occasion. [`Self::record`] must follow if so.
    pub(super) fn decide(&mut self) -> bool {
        if self.confidence >= MIN_CONFIDENCE_TO_ASK {
            return true;
        }
        self.skipped = (self.skipped + 1) % TRIAL_INTERVAL;
        self.skipped == 0
    }

    /// The answer.
    pub(super) fn record(&mut self, has_found_events: bool) {
        self.confidence = if has_found_events {
            (self.confidence + 1).min(MAX_CONFIDENCE)
        } else {
            self.confidence.saturating_sub(1)
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The number of questions on `occasions` occasions, of which each would find events, or none.
    fn questions(look: &mut LookAgain, occasions: usize, finds_events: bool) -> usize {
        (0..occasions)
            .filter(|_| {
                let asks = look.decide();
                if asks {
                    look.record(finds_events);
                }
                asks
            })
            .count()
    }

    #[test]
    fn it_asks_as_long_as_that_finds_events() {
        let mut look = LookAgain::new();
        assert_eq!(questions(&mut look, 1000, true), 1000);
        for _ in 0..100 {
            look.record(false);
            look.record(false);
            assert!(look.decide(), "most answers have events");
            (0..3).for_each(|_| look.record(true));
        }
    }

    #[test]
    fn it_seldom_asks_while_that_finds_nothing() {
        let mut look = LookAgain::new();
        let asked = questions(&mut look, 16_000, false);
        assert!((1000..=1010).contains(&asked), "{asked}");
    }

    #[test]
    fn it_notices_that_events_come_again() {
        let mut look = LookAgain::new();
        questions(&mut look, 1000, false);
        let asked = questions(&mut look, 1000, true);
        assert!(asked > 1000 - 3 * usize::from(TRIAL_INTERVAL), "{asked}");
    }
}
