//! Regular expressions of rules.
//!
//! A pattern must not depend on how a client writes a statement, so that other spacing or quoting evades no
//! rule. [`adapt`] therefore changes a pattern before it is compiled:
//! * Beside punctuation, spaces are optional: `id=1` matches `id = 1`, and `id = 1` matches `id=1`. That the punctuation
//!   is matched by something else in the pattern does not matter: `select .* from` matches `select *from`.
//! * Backticks are optional: `from users` matches ``from `users` ``.
//! * A single or double quote stands for both.
//! * `\b` knows ASCII words only, because the fast automata know no others.

use regex_automata::hybrid::dfa::{Cache, DFA, OverlappingState};
use regex_automata::meta;
use regex_automata::nfa::thompson;
use regex_automata::util::pool::Pool;
use regex_automata::{Anchored, Input, MatchKind, PatternSet};
use regex_syntax::hir::{Capture, Class, ClassUnicode, ClassUnicodeRange, Hir, HirKind, Look, Repetition};

use crate::error::KeyError;

const MAX_PATTERN_BYTES: usize = 4096;
/// The memory of one compiled pattern, and of all together.
const MAX_COMPILED_BYTES: usize = 1 << 20;
const MAX_ALL_COMPILED_BYTES: usize = 64 << 20;
/// The memory of each worker for what it has computed about all patterns. If it is full, the worker begins anew.
const MIN_CACHE_BYTES: usize = 1 << 20;
const MAX_CACHE_BYTES: usize = 32 << 20;
const CACHE_BYTES_PER_PATTERN: usize = 16 << 10;

/// Parses and checks a pattern. Letters match in upper and lower case.
pub(crate) fn parse(key: &'static str, pattern: &str) -> Result<Hir, KeyError> {
    if pattern.len() > MAX_PATTERN_BYTES {
        return Err(KeyError::new(key, format!("the pattern is longer than {MAX_PATTERN_BYTES} bytes")));
    }
    let hir = regex_syntax::ParserBuilder::new().utf8(false).case_insensitive(true).build().parse(pattern);
    let hir = hir.map_err(|error| {
        let (reason, offset) = match &error {
            regex_syntax::Error::Parse(error) => (error.kind().to_string(), error.span().start.offset),
            regex_syntax::Error::Translate(error) => (error.kind().to_string(), error.span().start.offset),
            other => (other.to_string(), 0),
        };
        KeyError { key, reason, position: Some(pattern[..offset].chars().count() + 1) }
    })?;
    let hir = adapt(hir);
    if hir.properties().minimum_len() == Some(0) {
        let reason = format!("the pattern matches every statement; for a rule about all statements, leave out {key}");
        return Err(KeyError::new(key, reason));
    }
    // Each pattern on its own, so that the error names the rule.
    let config = thompson::Config::new().nfa_size_limit(Some(MAX_COMPILED_BYTES)).utf8(false);
    let compiled =
        thompson::Compiler::new().configure(config.which_captures(thompson::WhichCaptures::None)).build_from_hir(&hir);
    compiled.map_err(|error| KeyError::new(key, format!("the pattern is too large: {error}")))?;
    Ok(hir)
}

/// Compiles one pattern, with its groups.
pub(crate) fn compile(key: &'static str, hir: &Hir) -> Result<meta::Regex, KeyError> {
    meta::Regex::builder()
        .configure(meta::Config::new().utf8_empty(false).nfa_size_limit(Some(4 * MAX_COMPILED_BYTES)))
        .build_from_hir(hir)
        .map_err(|error| KeyError::new(key, format!("the pattern is too large: {error}")))
}

fn adapt(hir: Hir) -> Hir {
    match hir.into_kind() {
        HirKind::Empty => Hir::empty(),
        HirKind::Literal(literal) => adapt_literal(&literal.0),
        HirKind::Class(class) if is_symbol_class(&class) => symbol(Hir::class(class)),
        HirKind::Class(class) if is_class_of(&class, char::is_whitespace) => space(Hir::class(class)),
        HirKind::Class(class) => Hir::class(class),
        HirKind::Look(look) => Hir::look(match look {
            Look::WordUnicode => Look::WordAscii,
            Look::WordUnicodeNegate => Look::WordAsciiNegate,
            Look::WordStartUnicode => Look::WordStartAscii,
            Look::WordEndUnicode => Look::WordEndAscii,
            Look::WordStartHalfUnicode => Look::WordStartHalfAscii,
            Look::WordEndHalfUnicode => Look::WordEndHalfAscii,
            other => other,
        }),
        HirKind::Repetition(repetition) => {
            Hir::repetition(Repetition { sub: Box::new(adapt(*repetition.sub)), ..repetition })
        }
        HirKind::Capture(capture) => Hir::capture(Capture { sub: Box::new(adapt(*capture.sub)), ..capture }),
        HirKind::Concat(parts) => Hir::concat(parts.into_iter().map(adapt).collect()),
        HirKind::Alternation(parts) => Hir::alternation(parts.into_iter().map(adapt).collect()),
    }
}

fn adapt_literal(literal: &[u8]) -> Hir {
    let adapt_byte = |byte: &u8| match byte {
        b' ' => space(Hir::literal(*b" ")),
        b'`' => Hir::concat(vec![optional(" "), optional("`"), optional(" ")]),
        b'\'' | b'"' => symbol(quotes()),
        _ if is_punctuation(char::from(*byte)) => symbol(Hir::literal([*byte])),
        _ => Hir::literal([*byte]),
    };
    Hir::concat(literal.iter().map(adapt_byte).collect())
}

/// Punctuation, with what may stand beside it.
fn symbol(symbol: Hir) -> Hir {
    Hir::concat(vec![optional("`"), optional(" "), symbol, optional(" "), optional("`")])
}

/// White space between words; the backtick of a name separates them, too, and so does punctuation on one side.
fn space(white_space: Hir) -> Hir {
    let spaced = Hir::concat(vec![optional("`"), white_space, optional("`")]);
    let [after, before] = [Look::WordStartHalfAscii, Look::WordEndHalfAscii].map(Hir::look);
    Hir::alternation(vec![spaced, Hir::literal(*b"`"), after, before])
}

fn optional(text: &'static str) -> Hir {
    let sub = Box::new(Hir::literal(text.as_bytes()));
    Hir::repetition(Repetition { min: 0, max: Some(1), greedy: true, sub })
}

fn quotes() -> Hir {
    let ranges = [ClassUnicodeRange::new('\'', '\''), ClassUnicodeRange::new('"', '"')];
    Hir::class(Class::Unicode(ClassUnicode::new(ranges)))
}

/// Whether the character is a token of its own, or a part of one, that needs no space beside it.
fn is_punctuation(character: char) -> bool {
    character.is_ascii_punctuation() && !matches!(character, '_' | '$')
}

/// Whether the class has only symbols, and one of them is punctuation.
fn is_symbol_class(class: &Class) -> bool {
    let is_word_symbol = |character: char| character.is_ascii_punctuation() && !is_punctuation(character);
    is_class_of(class, |character| character.is_ascii_punctuation()) && !is_class_of(class, is_word_symbol)
}

fn is_class_of(class: &Class, fits: impl Fn(char) -> bool) -> bool {
    let Class::Unicode(class) = class else { return false };
    // The classes in question are small.
    !class.ranges().is_empty()
        && class.ranges().iter().all(|range| {
            u32::from(range.end()) - u32::from(range.start()) < 32 && (range.start()..=range.end()).all(&fits)
        })
}

/// The patterns of many rules, which are matched in one pass.
#[derive(Debug)]
pub(crate) struct Patterns {
    automaton: DFA,
    caches: Pool<Cache, Box<dyn Fn() -> Cache + Send + Sync + std::panic::UnwindSafe + std::panic::RefUnwindSafe>>,
    /// The rule of each pattern.
    rules: Vec<usize>,
}

impl Patterns {
    /// None: there are no patterns.
    pub(crate) fn new(key: &'static str, patterns: &[(usize, &Hir)]) -> Result<Option<Self>, KeyError> {
        if patterns.is_empty() {
            return Ok(None);
        }
        let too_large = |error: &dyn std::fmt::Display| {
            KeyError::new(key, format!("the patterns of all rules together are too large: {error}"))
        };
        let config = thompson::Config::new()
            .nfa_size_limit(Some(MAX_ALL_COMPILED_BYTES))
            .utf8(false)
            .which_captures(thompson::WhichCaptures::None);
        let expressions = patterns.iter().map(|(_, hir)| *hir).collect::<Vec<_>>();
        let nfa = thompson::Compiler::new()
            .configure(config)
            .build_many_from_hir(&expressions)
            .map_err(|error| too_large(&error))?;
        let cache_bytes = (patterns.len() * CACHE_BYTES_PER_PATTERN).clamp(MIN_CACHE_BYTES, MAX_CACHE_BYTES);
        let automaton = DFA::builder()
            .configure(
                DFA::config().match_kind(MatchKind::All).cache_capacity(cache_bytes).skip_cache_capacity_check(true),
            )
            .build_from_nfa(nfa)
            .map_err(|error| too_large(&error))?;
        let template = automaton.clone();
        let caches = Pool::new(Box::new(move || template.create_cache()) as Box<_>);
        Ok(Some(Self { automaton, caches, rules: patterns.iter().map(|(rule, _)| *rule).collect() }))
    }

    /// Appends the rules whose patterns match, in order.
    pub(crate) fn find(&self, text: &[u8], found: &mut Vec<usize>) {
        let mut cache = self.caches.get();
        let input = Input::new(text).anchored(Anchored::No);
        // Mostly nothing matches, which this finds out without memory for a set.
        // An error is impossible: no byte ends the search, and a full cache is cleared.
        let mut state = OverlappingState::start();
        if self.automaton.try_search_overlapping_fwd(&mut cache, &input, &mut state).is_err()
            || state.get_match().is_none()
        {
            return;
        }
        let mut matching = PatternSet::new(self.rules.len());
        if self.automaton.try_which_overlapping_matches(&mut cache, &input, &mut matching).is_ok() {
            found.extend(matching.iter().map(|pattern| self.rules[pattern.as_usize()]));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matches(pattern: &str, text: &str) -> bool {
        let hir = parse("pattern", pattern).expect("a pattern");
        compile("pattern", &hir).expect("a pattern").is_match(text)
    }

    #[test]
    fn spacing_and_quoting_beside_punctuation_do_not_matter() {
        let pairs = [
            ("where id=1", "where id = 1"),
            ("where id = 1", "where id=1"),
            (r"sleep\(", "SLEEP ( 1 )"),
            (r"sleep \(\d+ \)", "sleep(1)"),
            (r"in \('a', 'b'\)", "in(\"a\",'b')"),
            ("delete from users", "delete from `users`"),
            ("delete from `users`", "delete from users"),
            ("from `shop`.`users`", "from shop . users"),
            (r"shop\.users", "`shop`.`users`"),
            (r"from\s+users", "from `users`"),
            (r"\busers\b", "`users`"),
            ("id [<>] 1", "id<1"),
            ("id[[:punct:]]1", "id = 1"),
            ("id [<>] 1", "`id`<1"),
            ("id (<|=) 1", "id=1"),
            ("id (=|in) 1", "id in 1"),
            (r"from \(?users", "from users"),
            (r"from \(?users", "from(users)"),
            (r"id\s+=\s+1", "id=1"),
            (r"users (where|limit)", "`users` limit"),
            ("select 'x'", "select'x'"),
            ("\u{e4}pfel", "\u{c4}PFEL"),
            ("kunden", "\u{212a}UNDEN"),
        ];
        for (pattern, text) in pairs {
            assert!(matches(pattern, text), "{pattern:?} {text:?}");
        }
        let others = [
            ("delete from users", "deletefrom users"),
            ("from `users`", "fromusers"),
            (r"from \(?users", "fromusers"),
            (r"\busers\b", "users2"),
            ("a[_$]b", "a _ b"),
            ("(?-i)A", "a"),
        ];
        for (pattern, text) in others {
            assert!(!matches(pattern, text), "{pattern:?} {text:?}");
        }
    }

    #[test]
    fn errors_name_the_character() {
        let error = |pattern: &str| parse("pattern", pattern).expect_err("an error");
        assert_eq!(error("ä(b").position, Some(2));
        assert_eq!(error("a**b)").position, Some(5));
        assert!(error("a(?=b)").reason.contains("look-around"), "{:?}", error("a(?=b)"));
        for pattern in ["a*", "`", " ", r"\s"] {
            assert!(error(pattern).reason.contains("leave out pattern"), "{pattern:?}");
        }
        assert!(error(r"\w{1000}").reason.contains("too large"));
        assert!(error(&"a".repeat(5000)).reason.contains("4096 bytes"));
    }

    #[test]
    fn one_pass_finds_all_rules() {
        let patterns =
            ["a b", "b", "x", "^a", "(?-u)\\xff"].map(|pattern| parse("pattern", pattern).expect("a pattern"));
        let patterns = patterns.iter().enumerate().map(|(index, hir)| (10 * index, hir)).collect::<Vec<_>>();
        let patterns = Patterns::new("pattern", &patterns).expect("patterns").expect("some");
        let find = |text: &[u8]| {
            let mut found = Vec::new();
            patterns.find(text, &mut found);
            found
        };
        assert_eq!(find(b"A B"), [0, 10, 30]);
        assert_eq!(find(b"\xff"), [40]);
        assert_eq!(find("ö".as_bytes()), [0; 0]);
        assert!(Patterns::new("pattern", &[]).expect("patterns").is_none());
    }
}
