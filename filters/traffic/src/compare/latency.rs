//! Latencies of many statements, and the ratio of two.

use serde::Serialize;

/// With fewer pairs, there is no ratio.
const MIN_PAIRS: u64 = 5;

/// The quantile of the normal distribution for a two-sided 95 % interval.
const Z: f64 = 1.959_963_984_540_054;

/// Latencies of the statements that succeeded on both sides, and the errors on this side. None: there is none.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Latency {
    pub median_us: Option<u64>,
    pub p95_us: Option<u64>,
    pub mean_us: Option<f64>,
    /// Pairs that failed on this side.
    pub errors: u64,
}

impl Latency {
    pub(super) fn of(mut latencies_us: Vec<u64>, errors: u64) -> Self {
        if latencies_us.is_empty() {
            return Self { errors, ..Self::default() };
        }
        latencies_us.sort_unstable();
        let sum: f64 = latencies_us.iter().map(|latency| *latency as f64).sum();
        Self {
            median_us: Some(quantile(&latencies_us, 50)),
            p95_us: Some(quantile(&latencies_us, 95)),
            mean_us: Some(sum / latencies_us.len() as f64),
            errors,
        }
    }
}

/// The smallest value that is not less than `percent` of the values.
fn quantile(sorted: &[u64], percent: usize) -> u64 {
    sorted[(sorted.len() * percent).div_ceil(100).max(1) - 1]
}

/// New latency divided by old latency, over pairs. None: there are too few pairs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Ratio {
    pub ratio: Option<f64>,
    /// Of the 95 % confidence interval.
    pub ratio_low: Option<f64>,
    pub ratio_high: Option<f64>,
}

/// Logarithms of the ratios of pairs: their number, mean, and sum of squared deviations from it.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct LogRatios {
    count: u64,
    mean: f64,
    deviations: f64,
}

impl LogRatios {
    /// A latency of 0 counts as 1 µs, which is the resolution.
    pub(super) fn add(&mut self, old_us: u64, new_us: u64) {
        let value = (new_us.max(1) as f64 / old_us.max(1) as f64).ln();
        self.add_all(&Self { count: 1, mean: value, deviations: 0.0 });
    }

    pub(super) fn add_all(&mut self, other: &Self) {
        let count = self.count + other.count;
        if count == 0 {
            return;
        }
        let difference = other.mean - self.mean;
        let share = other.count as f64 / count as f64;
        self.deviations += other.deviations + difference * difference * self.count as f64 * share;
        self.mean += difference * share;
        self.count = count;
    }

    pub(super) fn ratio(&self) -> Ratio {
        if self.count < MIN_PAIRS {
            return Ratio::default();
        }
        let count = self.count as f64;
        let standard_error = (self.deviations / (count - 1.0) / count).sqrt();
        let half_width = t_quantile(count - 1.0) * standard_error;
        Ratio {
            ratio: Some(self.mean.exp()),
            ratio_low: Some((self.mean - half_width).exp()),
            ratio_high: Some((self.mean + half_width).exp()),
        }
    }
}

/// The quantile of Student's t distribution for a two-sided 95 % interval: the series in 1/degrees of freedom of
/// Abramowitz and Stegun, 26.7.5. Its error is 0.3 % for 4 degrees of freedom, and less for more.
fn t_quantile(degrees: f64) -> f64 {
    let (z3, z5, z7) = (Z.powi(3), Z.powi(5), Z.powi(7));
    Z + (z3 + Z) / (4.0 * degrees)
        + (5.0 * z5 + 16.0 * z3 + 3.0 * Z) / (96.0 * degrees.powi(2))
        + (3.0 * z7 + 19.0 * z5 + 17.0 * z3 - 15.0 * Z) / (384.0 * degrees.powi(3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_t_quantile_agrees_with_tables() {
        for (degrees, expected) in [(4.0, 2.776), (9.0, 2.262), (29.0, 2.045), (1e6, 1.960)] {
            let quantile = t_quantile(degrees);
            assert!((quantile / expected - 1.0).abs() < 0.003, "{degrees}: {quantile}");
        }
    }

    #[test]
    fn quantiles_are_values_that_occurred() {
        let latency = Latency::of((1..=100).rev().collect(), 3);
        assert_eq!(latency, Latency { median_us: Some(50), p95_us: Some(95), mean_us: Some(50.5), errors: 3 });
        assert_eq!(Latency::of(vec![7], 0).p95_us, Some(7));
        assert_eq!(Latency::of(Vec::new(), 2), Latency { errors: 2, ..Latency::default() });
    }

    #[test]
    fn the_ratio_is_the_geometric_mean_with_its_interval() {
        // Logarithms -ln 2, 0, ln 2, ln 4, ln 8: mean ln 2, standard deviation ln 2 * sqrt(2.5).
        let mut ratios = LogRatios::default();
        for (old, new) in [(200, 100), (100, 100), (100, 200), (100, 400), (100, 800)] {
            ratios.add(old, new);
        }
        let Ratio { ratio: Some(ratio), ratio_low: Some(low), ratio_high: Some(high) } = ratios.ratio() else {
            panic!("no ratio of five pairs");
        };
        let half_width = 2.776 * 2_f64.ln() * (2.5_f64 / 5.0).sqrt();
        assert!((ratio - 2.0).abs() < 1e-9, "{ratio}");
        assert!((low / (2.0 / half_width.exp()) - 1.0).abs() < 0.005, "{low}");
        assert!((high / (2.0 * half_width.exp()) - 1.0).abs() < 0.005, "{high}");
    }

    #[test]
    fn few_pairs_have_no_ratio() {
        let mut ratios = LogRatios::default();
        for _ in 0..4 {
            ratios.add(0, 1);
            assert_eq!(ratios.ratio(), Ratio::default());
        }
        ratios.add(0, 0);
        let one = Some(1.0);
        assert_eq!(ratios.ratio(), Ratio { ratio: one, ratio_low: one, ratio_high: one });
    }

    #[test]
    fn groups_can_be_added() {
        let (mut all, mut first, mut second) = (LogRatios::default(), LogRatios::default(), LogRatios::default());
        for index in 1..50_u64 {
            let new = index * 37 % 23 + 1;
            all.add(index, new);
            let part = if index % 3 == 0 { &mut first } else { &mut second };
            part.add(index, new);
        }
        first.add_all(&second);
        first.add_all(&LogRatios::default());
        assert_eq!(first.count, all.count);
        assert!((first.mean - all.mean).abs() < 1e-12);
        assert!((first.deviations - all.deviations).abs() < 1e-9);
    }
}
