//! What is reported about the present or last capture.

use std::sync::atomic::Ordering;

use envoy_abi::extension::{Gauge, Metrics};

use crate::capture;

/// Gauges, since the numbers begin at zero with each capture.
pub(super) struct CaptureGauges {
    /// Identifies the capture.
    until: Gauge,
    active: Gauge,
    records: Gauge,
    dropped: Gauge,
    filtered: Gauge,
    bytes: Gauge,
    write_errors: Gauge,
}

impl CaptureGauges {
    pub(super) fn new(metrics: &mut Metrics) -> Result<Self, String> {
        Ok(Self {
            until: metrics.gauge("capture_until", &[])?,
            active: metrics.gauge("capture_active", &[])?,
            records: metrics.gauge("capture_records", &[])?,
            dropped: metrics.gauge("capture_dropped", &[])?,
            filtered: metrics.gauge("capture_filtered", &[])?,
            bytes: metrics.gauge("capture_bytes", &[])?,
            write_errors: metrics.gauge("capture_write_errors", &[])?,
        })
    }

    /// Reports nothing before the first capture of the process.
    pub(super) fn report(&self, metrics: &Metrics) {
        capture::report(|until, counts| {
            metrics.put(self.until, &[], until);
            metrics.put(self.active, &[], u64::from(counts.is_active.load(Ordering::Relaxed)));
            for (gauge, count) in [
                (self.records, &counts.records),
                (self.dropped, &counts.dropped),
                (self.filtered, &counts.filtered),
                (self.bytes, &counts.bytes),
                (self.write_errors, &counts.write_errors),
            ] {
                metrics.put(gauge, &[], count.load(Ordering::Relaxed));
            }
        });
    }
}
