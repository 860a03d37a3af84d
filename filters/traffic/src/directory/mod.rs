//! Reads directories of traffic: records with their results, or results alone.
//!
//! An innermost directory has the files of one process. A path may name one, or a directory above several.

mod file;
mod results;
mod statements;

use std::fs;
use std::path::{Path, PathBuf};

pub use results::ResultsReader;
pub use statements::{Position, Reader, Statement};

use crate::TrafficError;
use crate::meta::Meta;
use crate::names::{self, FileName, Kind};

/// Directories below a path that are searched: a capture has two levels.
const MAX_DEPTH: usize = 8;

/// The innermost directories with traffic files in and below `paths`, each once.
pub fn find(paths: &[PathBuf]) -> Result<Vec<PathBuf>, TrafficError> {
    find_kind(paths, Kind::Traffic)
}

/// The innermost directories with results files in and below `paths`, each once.
pub fn find_results(paths: &[PathBuf]) -> Result<Vec<PathBuf>, TrafficError> {
    find_kind(paths, Kind::Results)
}

/// What the file `meta` says. None: there is none, as of a process that ended abnormally.
pub fn read_meta(directory: &Path) -> Result<Option<Meta>, TrafficError> {
    let file = directory.join(names::META);
    match fs::read(&file) {
        Ok(json) => Meta::parse(&json).map(Some).map_err(|source| TrafficError::Meta { file, source }),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(TrafficError::Io { file, source }),
    }
}

fn find_kind(paths: &[PathBuf], kind: Kind) -> Result<Vec<PathBuf>, TrafficError> {
    let mut found = Vec::new();
    for path in paths {
        let before = found.len();
        search(path, kind, 0, &mut found)?;
        if found.len() == before {
            return Err(TrafficError::NothingFound { path: path.clone() });
        }
    }
    found.sort();
    found.dedup();
    Ok(found)
}

fn search(directory: &Path, kind: Kind, depth: usize, found: &mut Vec<PathBuf>) -> Result<(), TrafficError> {
    let mut has_files = false;
    for (path, is_directory) in entries(directory)? {
        if is_directory && depth < MAX_DEPTH {
            search(&path, kind, depth + 1, found)?;
        }
        has_files |= !is_directory && parsed_name(&path).is_some_and(|name| name.kind == kind);
    }
    if has_files {
        // The same directory may be given by two names.
        let directory = directory.to_path_buf();
        found.push(fs::canonicalize(&directory).unwrap_or(directory));
    }
    Ok(())
}

/// The files of a kind, in the order in which they are read: those that were closed, then the others, each by time.
fn files(directory: &Path, kind: Kind) -> Result<Vec<(PathBuf, FileName)>, TrafficError> {
    let mut files: Vec<(PathBuf, FileName)> = entries(directory)?
        .into_iter()
        .filter_map(|(path, is_directory)| Some((parsed_name(&path).filter(|_| !is_directory)?, path)))
        .filter(|(name, _)| name.kind == kind)
        .map(|(name, path)| (path, name))
        .collect();
    files.sort_by(|(path, name), (other_path, other)| {
        (name.is_open, name.order, path).cmp(&(other.is_open, other.order, other_path))
    });
    Ok(files)
}

fn entries(directory: &Path) -> Result<Vec<(PathBuf, bool)>, TrafficError> {
    let failed = |source| TrafficError::Io { file: directory.to_path_buf(), source };
    fs::read_dir(directory)
        .map_err(failed)?
        .map(|entry| {
            let entry = entry?;
            Ok((entry.path(), entry.file_type()?.is_dir()))
        })
        .collect::<Result<_, _>>()
        .map_err(failed)
}

fn parsed_name(path: &Path) -> Option<FileName> {
    names::parse(path.file_name()?.to_str()?)
}

#[cfg(test)]
mod tests;
