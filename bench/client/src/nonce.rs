//! Runs short sessions that check each byte of their answers, and that end in all possible ways.

use std::rc::Rc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::connection::{Connection, Progress, SCRATCH};
use crate::failure::{Failure, FailureCounts};
use crate::options::Nonce;
use crate::poller::{Events, Poller, Ready};
use crate::question::{Question, nonce};
use crate::response::Answer;
use crate::target::Target;

/// How long a session may receive nothing.
const RECEIVE_TIMEOUT: Duration = Duration::from_secs(30);
/// Bytes that are read at once if the session ends within the answer.
const SMALL_READ: usize = 4096;

/// How a session ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ending {
    /// COM_QUIT; the server closes.
    Quit,
    /// COM_QUIT, and closed at once.
    QuitAndClose,
    /// FIN; the server closes.
    Finish,
    /// Closed at once.
    Close,
    /// RST while the login goes on.
    CutLogin,
    /// RST while no answer is due.
    CutIdle,
    /// RST right after a statement.
    CutAsked,
    /// RST within an answer, after this many of its bytes were read.
    CutWithin(usize),
    /// Like `CutWithin`, by closing a socket that may have unread bytes.
    CloseWithin(usize),
}

struct Session {
    number: u64,
    nonce: String,
    connection: Connection,
    /// The question whose answer is due.
    question: Question,
    /// Answers that are still to come, including that of `question`.
    left: u32,
    ending: Ending,
    /// Nothing but the server's FIN may come.
    ended: bool,
    /// Bytes of the current answer that were read.
    read: usize,
    /// When the last event came.
    last_event: Instant,
}

struct Load {
    target: Rc<Target>,
    poller: Rc<Poller>,
    rng: fastrand::Rng,
    /// By token.
    sessions: Vec<Option<Session>>,
    begun: u64,
    wanted: u64,
    /// The share of the sessions that is cut.
    kill: f64,
    done: u64,
    answers: u64,
    bytes: u64,
    cut: u64,
    failures: FailureCounts,
}

pub(crate) fn run(options: &Nonce) -> Result<Value, Failure> {
    let seed = options.seed.unwrap_or_else(|| fastrand::u64(..));
    let start = Instant::now();
    let mut load = Load {
        target: Rc::new(Target::new(&options.server)?),
        poller: Rc::new(Poller::new()?),
        rng: fastrand::Rng::with_seed(seed),
        sessions: (0..options.parallel).map(|_| None).collect(),
        begun: 0,
        wanted: options.sessions.into(),
        kill: options.kill,
        done: 0,
        answers: 0,
        bytes: 0,
        cut: 0,
        failures: FailureCounts::default(),
    };
    load.work()?;
    let seconds = start.elapsed().as_secs_f64();
    let mut result = json!({
        "sessions": load.done, "answers": load.answers, "bytes": load.bytes, "cut": load.cut, "seconds": seconds,
        "seed": seed,
    });
    load.failures.add_to(&mut result);
    Ok(result)
}

impl Load {
    fn work(&mut self) -> Result<(), Failure> {
        let (poller, mut events, mut scratch) = (Rc::clone(&self.poller), Events::new(), vec![0; SCRATCH]);
        for token in 0..self.sessions.len() {
            self.begin(token)?;
        }
        let (second, mut checked_at) = (Duration::from_secs(1), Instant::now());
        while self.done < self.wanted {
            for ready in poller.wait(&mut events, second)? {
                self.on_ready(ready, &mut scratch)?;
            }
            let now = Instant::now();
            if now - checked_at > second {
                checked_at = now;
                for token in 0..self.sessions.len() {
                    if self.sessions[token].as_ref().is_some_and(|session| now - session.last_event > RECEIVE_TIMEOUT) {
                        self.fail(token, &Failure::Slow(RECEIVE_TIMEOUT))?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Begins the next session, if any is left.
    fn begin(&mut self, token: usize) -> Result<(), Failure> {
        if self.begun == self.wanted {
            return Ok(());
        }
        self.begun += 1;
        let number = self.begun;
        let nonce = nonce(number, self.rng.u64(..));
        self.sessions[token] = Some(Session {
            connection: Connection::open(&self.target, &self.poller, token)?,
            question: Question::choose(&mut self.rng, &nonce),
            left: self.rng.u32(2..=5),
            ending: ending(&mut self.rng, self.kill),
            number,
            nonce,
            ended: false,
            read: 0,
            last_event: Instant::now(),
        });
        Ok(())
    }

    fn on_ready(&mut self, ready: Ready, scratch: &mut [u8]) -> Result<(), Failure> {
        let Some(Some(session)) = self.sessions.get_mut(ready.token) else { return Ok(()) };
        if session.ending == Ending::CutLogin {
            return self.end(ready.token);
        }
        let length = if session.ends_within_answer() { SMALL_READ } else { scratch.len() };
        session.last_event = Instant::now();
        match session.connection.handle(ready, &mut scratch[..length], &mut session.question) {
            Err(Failure::Closed) if session.ended => self.replace(ready.token),
            Err(failure) => self.fail(ready.token, &failure),
            Ok(progress) => match self.advance(ready.token, progress) {
                Ok(true) => self.end(ready.token),
                Ok(false) => Ok(()),
                Err(failure) => self.fail(ready.token, &failure),
            },
        }
    }

    /// Sends the next question if an answer is complete. True: the session has to end now.
    fn advance(&mut self, token: usize, progress: Progress) -> Result<bool, Failure> {
        let Some(Some(session)) = self.sessions.get_mut(token) else { return Ok(false) };
        session.read += progress.bytes;
        if let Some(answer) = progress.answer {
            let due = session.question.rows();
            if answer != Answer::Rows(due) {
                return Err(Failure::Content(format!("{answer:?}, where {due} rows are due")));
            }
            self.answers += 1;
            self.bytes += session.read as u64;
            session.left -= 1;
            if session.left == 0 {
                return Ok(true);
            }
            session.question = Question::choose(&mut self.rng, &session.nonce);
        } else if !progress.logged_in {
            return Ok(matches!(session.ending, Ending::CutWithin(after) | Ending::CloseWithin(after)
                if session.left == 1 && session.read >= after));
        }
        session.read = 0;
        session.connection.send_commands(&session.question.packet(), 1)?;
        Ok(session.left == 1 && session.ending == Ending::CutAsked)
    }

    /// Ends a session in the way of its `ending`.
    fn end(&mut self, token: usize) -> Result<(), Failure> {
        let Some(mut session) = self.sessions[token].take() else { return Ok(()) };
        let ended = match session.ending {
            Ending::Quit => session.connection.quit(),
            Ending::QuitAndClose => session.connection.quit(),
            Ending::Finish => session.connection.finish(),
            Ending::Close | Ending::CloseWithin(_) => Ok(()),
            Ending::CutLogin | Ending::CutIdle | Ending::CutAsked | Ending::CutWithin(_) => {
                self.cut += 1;
                let ended = session.connection.reset();
                return ended.and_then(|()| self.replace(token));
            }
        };
        let waits_for_close = matches!(session.ending, Ending::Quit | Ending::Finish);
        self.cut += u64::from(matches!(session.ending, Ending::CloseWithin(_)));
        session.ended = true;
        self.sessions[token] = Some(session);
        match ended {
            Ok(()) if waits_for_close => Ok(()),
            Ok(()) => self.replace(token),
            Err(failure) => self.fail(token, &failure),
        }
    }

    fn fail(&mut self, token: usize, failure: &Failure) -> Result<(), Failure> {
        if let Some(session) = &self.sessions[token] {
            let Session { number, nonce, left, ending, question, .. } = session;
            self.failures.add_detailed(failure.kind(), || {
                let asked = question.statement();
                format!("session {number} ({nonce}, {left} answers left, ending {ending:?}), {asked}: {failure}")
            });
        }
        self.replace(token)
    }

    /// Closes a session, and begins the next one with its token.
    fn replace(&mut self, token: usize) -> Result<(), Failure> {
        self.sessions[token] = None;
        self.done += 1;
        self.begin(token)
    }
}

impl Session {
    /// Whether the session ends within the current answer.
    fn ends_within_answer(&self) -> bool {
        self.left == 1 && matches!(self.ending, Ending::CutWithin(_) | Ending::CloseWithin(_))
    }
}

fn ending(rng: &mut fastrand::Rng, kill: f64) -> Ending {
    if rng.f64() >= kill {
        return match rng.u8(..4) {
            0 => Ending::Quit,
            1 => Ending::QuitAndClose,
            2 => Ending::Finish,
            _ => Ending::Close,
        };
    }
    // If the answer is shorter, the session ends after it.
    let after = 1 << rng.u32(..17);
    match rng.u8(..8) {
        0 => Ending::CutLogin,
        1 => Ending::CutIdle,
        2 => Ending::CutAsked,
        3 => Ending::CloseWithin(after),
        _ => Ending::CutWithin(after),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configured_share_of_sessions_is_cut() {
        let mut rng = fastrand::Rng::with_seed(1);
        let mut cut = |kill: f64| {
            let polite = |ending: &Ending| {
                matches!(ending, Ending::Quit | Ending::QuitAndClose | Ending::Finish | Ending::Close)
            };
            (0..10_000).map(|_| ending(&mut rng, kill)).filter(|ending| !polite(ending)).count()
        };
        assert_eq!(cut(0.0), 0);
        assert_eq!(cut(1.0), 10_000);
        assert!((2_500..3_500).contains(&cut(0.3)));
    }
}
