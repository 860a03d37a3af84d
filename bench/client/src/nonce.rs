//! Short sessions that know what each byte of their answers must be, and end in all the ways there are.

use std::rc::Rc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::connection::{Connection, Progress, SCRATCH};
use crate::failure::{Failure, Tally};
use crate::options::Nonce;
use crate::poller::{Events, Poller, Ready};
use crate::question::{Question, nonce};
use crate::response::Answer;
use crate::target::Target;

/// For each session, without any byte.
const PATIENCE: Duration = Duration::from_secs(30);
/// Bytes that are read at once where an answer is to be cut.
const LITTLE: usize = 4096;

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
    /// RST while nothing is due.
    CutIdle,
    /// RST right behind a statement.
    CutAsked,
    /// RST within an answer, when so many of its bytes were read.
    CutWithin(usize),
    /// The same, by closing a socket that was not read empty.
    CloseWithin(usize),
}

struct Session {
    number: u64,
    nonce: String,
    connection: Connection,
    /// What is being answered.
    question: Question,
    /// Answers that are still to come, that of `question` included.
    left: u32,
    ending: Ending,
    /// Nothing but the server's FIN may come.
    ended: bool,
    /// Bytes of the current answer.
    read: usize,
    heard: Instant,
}

struct Load {
    target: Rc<Target>,
    poller: Rc<Poller>,
    dice: fastrand::Rng,
    /// By token.
    sessions: Vec<Option<Session>>,
    begun: u64,
    wanted: u64,
    /// Of the sessions; the share that is cut.
    kill: f64,
    done: u64,
    answers: u64,
    bytes: u64,
    cut: u64,
    tally: Tally,
}

pub(crate) fn run(options: &Nonce) -> Result<Value, Failure> {
    let seed = options.seed.unwrap_or_else(|| fastrand::u64(..));
    let start = Instant::now();
    let mut load = Load {
        target: Rc::new(Target::new(&options.server)?),
        poller: Rc::new(Poller::new()?),
        dice: fastrand::Rng::with_seed(seed),
        sessions: (0..options.parallel).map(|_| None).collect(),
        begun: 0,
        wanted: options.sessions.into(),
        kill: options.kill,
        done: 0,
        answers: 0,
        bytes: 0,
        cut: 0,
        tally: Tally::default(),
    };
    load.work()?;
    let seconds = start.elapsed().as_secs_f64();
    let mut found = json!({
        "sessions": load.done, "answers": load.answers, "bytes": load.bytes, "cut": load.cut, "seconds": seconds,
        "seed": seed,
    });
    load.tally.tell(&mut found);
    Ok(found)
}

impl Load {
    fn work(&mut self) -> Result<(), Failure> {
        let (poller, mut events, mut scratch) = (Rc::clone(&self.poller), Events::new(), vec![0; SCRATCH]);
        for token in 0..self.sessions.len() {
            self.begin(token)?;
        }
        let (second, mut swept) = (Duration::from_secs(1), Instant::now());
        while self.done < self.wanted {
            for ready in poller.wait(&mut events, second)? {
                self.look(ready, &mut scratch)?;
            }
            let now = Instant::now();
            if now - swept > second {
                swept = now;
                for token in 0..self.sessions.len() {
                    if self.sessions[token].as_ref().is_some_and(|session| now - session.heard > PATIENCE) {
                        self.fail(token, &Failure::Slow(PATIENCE))?;
                    }
                }
            }
        }
        Ok(())
    }

    /// The next session, if one is left.
    fn begin(&mut self, token: usize) -> Result<(), Failure> {
        if self.begun == self.wanted {
            return Ok(());
        }
        self.begun += 1;
        let number = self.begun;
        let nonce = nonce(number, self.dice.u64(..));
        self.sessions[token] = Some(Session {
            connection: Connection::open(&self.target, &self.poller, token)?,
            question: Question::choose(&mut self.dice, &nonce),
            left: self.dice.u32(2..=5),
            ending: ending(&mut self.dice, self.kill),
            number,
            nonce,
            ended: false,
            read: 0,
            heard: Instant::now(),
        });
        Ok(())
    }

    fn look(&mut self, ready: Ready, scratch: &mut [u8]) -> Result<(), Failure> {
        let Some(Some(session)) = self.sessions.get_mut(ready.token) else { return Ok(()) };
        if session.ending == Ending::CutLogin {
            return self.end(ready.token);
        }
        let most = if session.cuts_now() { LITTLE } else { scratch.len() };
        session.heard = Instant::now();
        match session.connection.handle(ready, &mut scratch[..most], &mut session.question) {
            Err(Failure::Closed) if session.ended => self.forget(ready.token),
            Err(failure) => self.fail(ready.token, &failure),
            Ok(progress) => match self.go_on(ready.token, progress) {
                Ok(true) => self.end(ready.token),
                Ok(false) => Ok(()),
                Err(failure) => self.fail(ready.token, &failure),
            },
        }
    }

    /// Asks what comes next. True: nothing is left to ask, or it is time to cut.
    fn go_on(&mut self, token: usize, progress: Progress) -> Result<bool, Failure> {
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
            session.question = Question::choose(&mut self.dice, &session.nonce);
        } else if !progress.logged_in {
            return Ok(matches!(session.ending, Ending::CutWithin(after) | Ending::CloseWithin(after)
                if session.left == 1 && session.read >= after));
        }
        session.read = 0;
        session.connection.ask(&session.question.packet(), 1)?;
        Ok(session.left == 1 && session.ending == Ending::CutAsked)
    }

    /// Ends a session in its own way.
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
                return ended.and_then(|()| self.forget(token));
            }
        };
        let waits = matches!(session.ending, Ending::Quit | Ending::Finish);
        self.cut += u64::from(matches!(session.ending, Ending::CloseWithin(_)));
        session.ended = true;
        self.sessions[token] = Some(session);
        match ended {
            Ok(()) if waits => Ok(()),
            Ok(()) => self.forget(token),
            Err(failure) => self.fail(token, &failure),
        }
    }

    fn fail(&mut self, token: usize, failure: &Failure) -> Result<(), Failure> {
        if let Some(session) = &self.sessions[token] {
            let Session { number, nonce, left, ending, question, .. } = session;
            self.tally.add_detailed(failure.kind(), || {
                let asked = question.statement();
                format!("session {number} ({nonce}, {left} answers left, ending {ending:?}), {asked}: {failure}")
            });
        }
        self.forget(token)
    }

    /// Closes one; the next takes its place.
    fn forget(&mut self, token: usize) -> Result<(), Failure> {
        self.sessions[token] = None;
        self.done += 1;
        self.begin(token)
    }
}

impl Session {
    /// Whether the answer that comes is one to be cut.
    fn cuts_now(&self) -> bool {
        self.left == 1 && matches!(self.ending, Ending::CutWithin(_) | Ending::CloseWithin(_))
    }
}

fn ending(dice: &mut fastrand::Rng, kill: f64) -> Ending {
    if dice.f64() >= kill {
        return match dice.u8(..4) {
            0 => Ending::Quit,
            1 => Ending::QuitAndClose,
            2 => Ending::Finish,
            _ => Ending::Close,
        };
    }
    // Where an answer is shorter than that, the session ends behind it.
    let after = 1 << dice.u32(..17);
    match dice.u8(..8) {
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
    fn only_the_share_that_is_asked_for_is_cut() {
        let mut dice = fastrand::Rng::with_seed(1);
        let mut cut = |kill: f64| {
            let polite = |ending: &Ending| {
                matches!(ending, Ending::Quit | Ending::QuitAndClose | Ending::Finish | Ending::Close)
            };
            (0..10_000).map(|_| ending(&mut dice, kill)).filter(|ending| !polite(ending)).count()
        };
        assert_eq!(cut(0.0), 0);
        assert_eq!(cut(1.0), 10_000);
        assert!((2_500..3_500).contains(&cut(0.3)));
    }
}
